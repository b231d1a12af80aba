package main

import (
	"context"
	"path/filepath"
	"strings"

	"github.com/flyteorg/flyte/flyteidl/clients/go/coreutils"
	"github.com/flyteorg/flyte/flyteidl/gen/pb-go/flyteidl/admin"
	"github.com/flyteorg/flyte/flyteidl/gen/pb-go/flyteidl/core"
	"github.com/flyteorg/flyte/flytepropeller/pkg/compiler"
	"github.com/flyteorg/flyte/flytepropeller/pkg/compiler/common"
	"github.com/flyteorg/flyte/flytepropeller/pkg/compiler/transformers/k8s"
	"github.com/golang/protobuf/proto"
)

// registered is what one `pyflyte package` holds.
type registered struct {
	tasks     []*core.TaskTemplate
	workflows []*admin.WorkflowSpec
	plans     []*admin.LaunchPlan
}

func read(folder string) registered {
	all := registered{}
	for _, file := range globbed(folder, "*.pb") {
		switch name := filepath.Base(file); {
		case strings.HasSuffix(name, "_1.pb"):
			all.tasks = append(all.tasks, load(file, &admin.TaskSpec{}).GetTemplate())
		case strings.HasSuffix(name, "_2.pb"):
			all.workflows = append(all.workflows, load(file, &admin.WorkflowSpec{}))
		default:
			all.plans = append(all.plans, load(file, &admin.LaunchPlan{}))
		}
	}
	return all
}

// compile has Flyte check everything, as it does where something is registered and where it is started; it returns the
// names of what it has accepted.
func (r registered) compile() []string {
	accepted := []string{}
	for _, task := range r.tasks {
		compiled(task)
		accepted = append(accepted, "task "+task.GetId().GetName())
	}
	for _, workflow := range r.workflows {
		r.closure(workflow)
		accepted = append(accepted, "workflow "+workflow.GetTemplate().GetId().GetName())
	}
	for _, plan := range r.plans {
		workflow := r.workflow(plan.GetSpec().GetWorkflowId().GetName())
		started(r.closure(workflow), inputs(plan.GetSpec()))
		accepted = append(accepted, "launch plan "+plan.GetId().GetName())
	}
	return accepted
}

func (r registered) resources(ctx context.Context) (map[string]any, map[string][]string) {
	made, links := map[string]any{}, map[string][]string{}
	for _, task := range r.tasks {
		name, w := task.GetId().GetName(), newWorld(ctx, task)
		made[name] = w.resource(ctx)
		w.round(ctx)
		links[name] = w.links
	}
	return made, links
}

func (r registered) workflow(name string) *admin.WorkflowSpec {
	for _, workflow := range r.workflows {
		if workflow.GetTemplate().GetId().GetName() == name {
			return workflow
		}
	}
	panic("no workflow " + name)
}

func (r registered) closure(workflow *admin.WorkflowSpec) *core.CompiledWorkflowClosure {
	tasks := []*core.CompiledTask{}
	for _, task := range r.tasks {
		tasks = append(tasks, compiled(task))
	}
	plans := []common.InterfaceProvider{}
	for _, plan := range r.plans {
		outputs := r.workflow(plan.GetSpec().GetWorkflowId().GetName()).GetTemplate().GetInterface().GetOutputs()
		plan.Closure = &admin.LaunchPlanClosure{ExpectedInputs: plan.GetSpec().GetDefaultInputs(), ExpectedOutputs: outputs}
		plans = append(plans, compiler.NewLaunchPlanInterfaceProvider(plan))
	}
	closure, err := compiler.CompileWorkflow(workflow.GetTemplate(), workflow.GetSubWorkflows(), tasks, plans)
	must(err)
	return closure
}

func compiled(task *core.TaskTemplate) *core.CompiledTask {
	done, err := compiler.CompileTask(task)
	must(err)
	return done
}

func started(closure *core.CompiledWorkflowClosure, inputs *core.LiteralMap) {
	_, err := k8s.BuildFlyteWorkflow(closure, inputs, execution, namespace)
	must(err)
}

// inputs are a launch plan's own; what it requires gets its type's default.
func inputs(plan *admin.LaunchPlanSpec) *core.LiteralMap {
	given := map[string]*core.Literal{}
	for name, parameter := range plan.GetDefaultInputs().GetParameters() {
		if given[name] = parameter.GetDefault(); given[name] == nil {
			given[name] = defaultOf(parameter.GetVar().GetType())
		}
	}
	for name, value := range plan.GetFixedInputs().GetLiterals() {
		given[name] = value
	}
	return &core.LiteralMap{Literals: given}
}

func defaults(variables *core.VariableMap) map[string]*core.Literal {
	made := map[string]*core.Literal{}
	for name, variable := range variables.GetVariables() {
		made[name] = defaultOf(variable.GetType())
	}
	return made
}

// defaultOf knows tables, too, which Flyte's own function refuses.
func defaultOf(kind *core.LiteralType) *core.Literal {
	table := kind.GetStructuredDatasetType()
	if table == nil {
		return coreutils.MustMakeDefaultLiteralForType(kind)
	}
	value := &core.StructuredDataset{Metadata: &core.StructuredDatasetMetadata{StructuredDatasetType: table}}
	scalar := &core.Scalar{Value: &core.Scalar_StructuredDataset{StructuredDataset: value}}
	return &core.Literal{Value: &core.Literal_Scalar{Scalar: scalar}}
}

// alone is a workflow of one task, whose node says of it what flytekit lets it say.
func alone(task *core.TaskTemplate) *core.CompiledWorkflowClosure {
	id := proto.Clone(task.GetId()).(*core.Identifier)
	id.ResourceType = core.ResourceType_WORKFLOW
	said := task.GetMetadata()
	node := &core.Node{
		Id: "n0",
		Metadata: &core.NodeMetadata{
			Retries:            said.GetRetries(),
			InterruptibleValue: &core.NodeMetadata_Interruptible{Interruptible: said.GetInterruptible()},
		},
		Target: &core.Node_TaskNode{TaskNode: &core.TaskNode{
			Reference: &core.TaskNode_ReferenceId{ReferenceId: task.GetId()},
		}},
		Inputs: bound("start-node", task.GetInterface().GetInputs()),
	}
	workflow := &core.WorkflowTemplate{
		Id:               id,
		Metadata:         &core.WorkflowMetadata{},
		Interface:        task.GetInterface(),
		Nodes:            []*core.Node{node},
		Outputs:          bound("n0", task.GetInterface().GetOutputs()),
		MetadataDefaults: &core.WorkflowMetadataDefaults{},
	}
	closure, err := compiler.CompileWorkflow(workflow, nil, []*core.CompiledTask{compiled(task)}, nil)
	must(err)
	return closure
}

func bound(node string, variables *core.VariableMap) []*core.Binding {
	bindings := []*core.Binding{}
	for name := range variables.GetVariables() {
		promise := &core.BindingData_Promise{Promise: &core.OutputReference{NodeId: node, Var: name}}
		bindings = append(bindings, &core.Binding{Var: name, Binding: &core.BindingData{Value: promise}})
	}
	return bindings
}
