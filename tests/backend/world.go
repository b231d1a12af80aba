package main

import (
	"context"
	"encoding/json"
	"log"

	daskAPI "github.com/dask/dask-kubernetes/v2023/dask_kubernetes/operator/go_client/pkg/apis/kubernetes.dask.org/v1"
	"github.com/flyteorg/flyte/flyteidl/gen/pb-go/flyteidl/admin"
	"github.com/flyteorg/flyte/flyteidl/gen/pb-go/flyteidl/core"
	"github.com/flyteorg/flyte/flyteidl/gen/pb-go/flyteidl/event"
	eventMocks "github.com/flyteorg/flyte/flytepropeller/events/mocks"
	"github.com/flyteorg/flyte/flytepropeller/pkg/apis/flyteworkflow/v1alpha1"
	"github.com/flyteorg/flyte/flytepropeller/pkg/compiler/transformers/k8s"
	propeller "github.com/flyteorg/flyte/flytepropeller/pkg/controller/config"
	"github.com/flyteorg/flyte/flytepropeller/pkg/controller/executors"
	executorMocks "github.com/flyteorg/flyte/flytepropeller/pkg/controller/executors/mocks"
	"github.com/flyteorg/flyte/flytepropeller/pkg/controller/nodes"
	"github.com/flyteorg/flyte/flytepropeller/pkg/controller/nodes/catalog"
	"github.com/flyteorg/flyte/flytepropeller/pkg/controller/nodes/factory"
	"github.com/flyteorg/flyte/flytepropeller/pkg/controller/nodes/subworkflow/launchplan"
	"github.com/flyteorg/flyte/flytepropeller/pkg/controller/workflow"
	"github.com/flyteorg/flyte/flytepropeller/pkg/controller/workflowstore"
	"github.com/flyteorg/flyte/flytestdlib/contextutils"
	"github.com/flyteorg/flyte/flytestdlib/promutils"
	"github.com/flyteorg/flyte/flytestdlib/promutils/labeled"
	"github.com/flyteorg/flyte/flytestdlib/storage"
	"github.com/golang/protobuf/proto"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/tools/record"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/apiutil"
)

const (
	namespace   = "flytesnacks-development"
	maxAttempts = 20
	maxRounds   = 20
)

var (
	execution = &core.WorkflowExecutionIdentifier{Project: "flytesnacks", Domain: "development", Name: "f3a"}
	// What flyteadmin's `task_resources` gives to tasks that say nothing.
	platform = v1alpha1.TaskResources{
		Requests: v1alpha1.TaskResourceSpec{CPU: resource.MustParse("500m"), Memory: resource.MustParse("500Mi")},
		Limits:   v1alpha1.TaskResourceSpec{CPU: resource.MustParse("192"), Memory: resource.MustParse("2Ti")},
	}
)

// world is a propeller with a Kubernetes, a storage and one execution of one task.
type world struct {
	propeller executors.Workflow
	kube      client.Client
	store     *storage.DataStore
	execution *v1alpha1.FlyteWorkflow
	phases    map[int][]string
	// Where the console's links of the newest attempt lead.
	links []string
	job   *daskAPI.DaskJob
}

func init() {
	labeled.SetMetricKeys(contextutils.ProjectKey, contextutils.DomainKey, contextutils.WorkflowIDKey, contextutils.TaskIDKey)
}

func newWorld(ctx context.Context, task *core.TaskTemplate) *world {
	store, err := storage.NewDataStore(&storage.Config{Type: storage.TypeMemory}, promutils.NewTestScope())
	must(err)
	kube := executorMocks.NewFakeKubeClient()
	w := &world{kube: kube.GetClient(), store: store, phases: map[int][]string{}}
	w.propeller = newPropeller(ctx, store, kube, &eventMocks.MockEventSink{SinkCb: w.record})
	must(w.propeller.Initialize(ctx))
	given := &core.LiteralMap{Literals: defaults(task.GetInterface().GetInputs())}
	w.execution, err = k8s.BuildFlyteWorkflow(alone(task), given, execution, namespace)
	must(err)
	// What flyteadmin adds.
	w.execution.ExecutionID = v1alpha1.ExecutionID{WorkflowExecutionIdentifier: execution}
	w.execution.WorkflowMeta = &v1alpha1.WorkflowMeta{EventVersion: v1alpha1.EventVersion2}
	w.execution.ServiceAccountName = "training"
	w.execution.ConsoleURL = "https://flyte.example/console"
	w.execution.ExecutionConfig = v1alpha1.ExecutionConfig{TaskResources: platform}
	w.execution.RawOutputDataConfig = v1alpha1.RawOutputDataConfig{RawOutputDataConfig: &admin.RawOutputDataConfig{}}
	return w
}

func newPropeller(ctx context.Context, store *storage.DataStore, kube *executorMocks.Client, sink *eventMocks.MockEventSink) executors.Workflow {
	settings, events := propeller.GetConfig(), &propeller.EventConfig{RawOutputPolicy: propeller.RawOutputPolicyReference}
	offloading := propeller.LiteralOffloadingConfig{}
	launcher := launchplan.NewFailFastLaunchPlanExecutor()
	enqueue := func(v1alpha1.WorkflowID) {}
	cache := catalog.NOOPCatalog{}
	handlers, err := factory.NewHandlerFactory(ctx, launcher, launcher, kube, fake.NewSimpleClientset(), cache, nil,
		events, offloading, "", nil, promutils.NewTestScope())
	must(err)
	node, err := nodes.NewExecutor(ctx, settings.NodeConfig, store, enqueue, sink, launcher, launcher,
		"s3://flyte/raw", kube, cache, nil, offloading, events, "", nil, handlers, promutils.NewTestScope())
	must(err)
	running, err := workflowstore.NewExecutionStatsHolder()
	must(err)
	made, err := workflow.NewExecutor(ctx, store, enqueue, sink, &record.FakeRecorder{}, "s3://flyte/metadata", node,
		events, "", promutils.NewTestScope(), running)
	must(err)
	return made
}

func (w *world) record(_ context.Context, message proto.Message) error {
	if task, isTask := message.(*event.TaskExecutionEvent); isTask {
		number, phase := int(task.GetRetryAttempt()), task.GetPhase().String()
		if known := w.phases[number]; len(known) == 0 || known[len(known)-1] != phase {
			w.phases[number] = append(known, phase)
		}
		w.links = []string{}
		for _, link := range task.GetLogs() {
			w.links = append(w.links, link.GetUri())
		}
	}
	return nil
}

func (w *world) round(ctx context.Context) {
	must(w.propeller.HandleFlyteWorkflow(ctx, w.execution))
	for _, status := range w.execution.Status.NodeStatus {
		status.ResetDirty()
	}
}

func (w *world) phase() v1alpha1.WorkflowPhase { return w.execution.Status.Phase }

func (w *world) isOver() bool {
	return w.phase() == v1alpha1.WorkflowPhaseSuccess || w.phase() == v1alpha1.WorkflowPhaseFailed
}

// launched are what propeller has had Kubernetes make so far.
func (w *world) launched(ctx context.Context) []client.Object {
	jobs, pods, all := &daskAPI.DaskJobList{}, &corev1.PodList{}, []client.Object{}
	must(w.kube.List(ctx, jobs))
	must(w.kube.List(ctx, pods))
	for i := range jobs.Items {
		all = append(all, &jobs.Items[i])
	}
	for i := range pods.Items {
		all = append(all, &pods.Items[i])
	}
	return all
}

// resource is what propeller makes of the task.
func (w *world) resource(ctx context.Context) any {
	for range maxRounds {
		w.round(ctx)
		if launched := w.launched(ctx); len(launched) > 0 {
			return plain(launched[0])
		}
	}
	log.Panicf("%s starts nothing: %v", w.execution.Name, w.execution.Status)
	return nil
}

// plain is the object as Flyte has sent it.
func plain(object client.Object) any {
	kind, err := apiutil.GVKForObject(object, scheme.Scheme)
	must(err)
	object.GetObjectKind().SetGroupVersionKind(kind)
	object.SetResourceVersion("")
	text, err := json.Marshal(object)
	must(err)
	fields := map[string]any{}
	must(json.Unmarshal(text, &fields))
	delete(fields, "status")
	return fields
}
