package main

import (
	"context"
	"encoding/json"
	"log"
	"slices"

	"connectrpc.com/connect"
	daskAPI "github.com/dask/dask-kubernetes/v2023/dask_kubernetes/operator/go_client/pkg/apis/kubernetes.dask.org/v1"
	"github.com/golang/protobuf/proto"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/tools/events"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/cache/informertest"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/apiutil"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"

	flyteorg "github.com/flyteorg/flyte/v2/executor/api/v1"
	"github.com/flyteorg/flyte/v2/executor/pkg/controller"
	"github.com/flyteorg/flyte/v2/executor/pkg/plugin"
	"github.com/flyteorg/flyte/v2/flyteplugins/go/tasks/pluginmachinery"
	"github.com/flyteorg/flyte/v2/flytestdlib/contextutils"
	"github.com/flyteorg/flyte/v2/flytestdlib/otelutils"
	"github.com/flyteorg/flyte/v2/flytestdlib/promutils"
	"github.com/flyteorg/flyte/v2/flytestdlib/promutils/labeled"
	"github.com/flyteorg/flyte/v2/flytestdlib/storage"
	"github.com/flyteorg/flyte/v2/gen/go/flyteidl2/core"
	"github.com/flyteorg/flyte/v2/gen/go/flyteidl2/workflow"
)

const maxAttempts = 5

// world is an executor with a Kubernetes, a storage and one action, which runs one task.
type world struct {
	executor *controller.TaskActionReconciler
	kube     client.Client
	store    *storage.DataStore
	action   client.ObjectKey
	// What the executor says of the action, one after the other.
	phases []string
}

func init() {
	labeled.SetMetricKeys(contextutils.ProjectKey, contextutils.DomainKey)
	must(flyteorg.AddToScheme(scheme.Scheme))
	for _, register := range pluginmachinery.PluginRegistry().GetSchemeRegisters() {
		must(register.AddToScheme(scheme.Scheme))
	}
}

// kubernetes is what plugins see of it: nothing there has events.
type kubernetes struct {
	client client.Client
	cache  cache.Cache
}

func (k kubernetes) GetClient() client.Client { return k.client }
func (k kubernetes) GetCache() cache.Cache    { return k.cache }

func newWorld(ctx context.Context, task *core.TaskTemplate) *world {
	store, err := storage.NewDataStore(&storage.Config{Type: storage.TypeMemory}, promutils.NewTestScope())
	must(err)
	kube := kubernetes{
		fake.NewClientBuilder().WithScheme(scheme.Scheme).WithStatusSubresource(&flyteorg.TaskAction{}).Build(),
		&informertest.FakeInformers{Scheme: scheme.Scheme},
	}
	template, err := proto.Marshal(task)
	must(err)
	action := &flyteorg.TaskAction{
		ObjectMeta: metav1.ObjectMeta{Name: "run-a0", Namespace: "flytesnacks-development", UID: "uid"},
		Spec: flyteorg.TaskActionSpec{
			RunName: "run", Project: "flytesnacks", Domain: "development", ActionName: "a0", TaskType: task.GetType(),
			TaskTemplate: template, InputURI: "mem://flyte/run/a0/inputs.pb", RunOutputBase: "mem://flyte/run",
		},
	}
	must(kube.client.Create(ctx, action))
	w := &world{kube: kube.client, store: store, action: client.ObjectKeyFromObject(action)}
	setup := plugin.NewSetupContext(kube, plugin.NewNoopSecretManager(), plugin.NewNoopResourceRegistrar(), nil, nil,
		"TaskAction", promutils.NewTestScope())
	registry := plugin.NewRegistry(setup, pluginmachinery.PluginRegistry())
	must(registry.Initialize(ctx))
	w.executor = controller.NewTaskActionReconciler(w.kube, scheme.Scheme, registry, store, w, "cluster",
		otelutils.GetMeterProvider("executor"), kube.cache)
	w.executor.SecretManager = plugin.NewNoopSecretManager()
	w.executor.ResourceManager = plugin.NewNoopResourceManager()
	w.executor.Recorder = events.NewFakeRecorder(1000)
	return w
}

// Record is the service that the executor reports to.
func (w *world) Record(_ context.Context, request *connect.Request[workflow.RecordRequest]) (*connect.Response[workflow.RecordResponse], error) {
	for _, event := range request.Msg.GetEvents() {
		phase := event.GetPhase().String()
		if n := len(w.phases); n == 0 || w.phases[n-1] != phase {
			w.phases = append(w.phases, phase)
		}
	}
	return connect.NewResponse(&workflow.RecordResponse{}), nil
}

func (w *world) reconcile(ctx context.Context, rounds int) {
	for range rounds {
		_, err := w.executor.Reconcile(ctx, ctrl.Request{NamespacedName: w.action})
		must(err)
	}
}

// launched is what runs the task now, or nil.
func (w *world) launched(ctx context.Context) client.Object {
	jobs, pods := &daskAPI.DaskJobList{}, &corev1.PodList{}
	must(w.kube.List(ctx, jobs))
	must(w.kube.List(ctx, pods))
	for i := range jobs.Items {
		return &jobs.Items[i]
	}
	for i := range pods.Items {
		return &pods.Items[i]
	}
	return nil
}

// plain is the object as Flyte has sent it.
func plain(object client.Object) any {
	if object == nil {
		log.Panic("nothing was started")
	}
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

// course is what becomes of an action.
type course struct {
	Attempts []attempt `json:"attempts"`
	Phases   []string  `json:"phases"`
	End      string    `json:"end"`
	Message  string    `json:"message,omitempty"`
}

type attempt struct {
	Job                string `json:"job"`
	Outputs            string `json:"outputs"`
	Checkpoint         string `json:"checkpoint"`
	PreviousCheckpoint string `json:"previous checkpoint"`
}

// attempts has each attempt that the executor starts end in that way.
func attempts(ctx context.Context, task *core.TaskTemplate, end func(*world, int)) course {
	w, seen := newWorld(ctx, task), course{Attempts: []attempt{}}
	w.reconcile(ctx, 2)
	for number := 0; number < maxAttempts; number++ {
		job, running := w.launched(ctx).(*daskAPI.DaskJob)
		if !running {
			break
		}
		seen.Attempts = append(seen.Attempts, attempt{
			Job: job.Name, Outputs: argument(job, "--outputs-path"),
			Checkpoint: argument(job, "--checkpoint-path"), PreviousCheckpoint: argument(job, "--prev-checkpoint"),
		})
		for _, state := range []daskAPI.JobStatus{daskAPI.DaskJobCreated, daskAPI.DaskJobClusterCreated, daskAPI.DaskJobRunning} {
			w.report(ctx, state)
			w.reconcile(ctx, 1)
		}
		end(w, number)
		w.reconcile(ctx, 1)
		if w.isOver(ctx) {
			break
		}
		w.reconcile(ctx, 1) // what comes next, if anything does
	}
	seen.Phases = w.phases
	found := &flyteorg.TaskAction{}
	must(w.kube.Get(ctx, w.action, found))
	seen.End = "goes on"
	for _, condition := range found.Status.Conditions {
		if condition.Status == metav1.ConditionTrue {
			seen.End = condition.Type
		}
	}
	if failed := found.Status.ErrorState; failed != nil {
		seen.Message = failed.Kind + ": " + failed.Message
	}
	return seen
}

func (w *world) isOver(ctx context.Context) bool {
	found := &flyteorg.TaskAction{}
	must(w.kube.Get(ctx, w.action, found))
	return slices.ContainsFunc(found.Status.Conditions, func(condition metav1.Condition) bool {
		return condition.Type != string(flyteorg.ConditionTypeProgressing) && condition.Status == metav1.ConditionTrue
	})
}

func argument(job *daskAPI.DaskJob, name string) string {
	given := job.Spec.Job.Spec.Containers[0].Args
	return given[slices.Index(given, name)+1]
}

// report says of the job what the operator would.
func (w *world) report(ctx context.Context, status daskAPI.JobStatus) {
	job := w.launched(ctx).(*daskAPI.DaskJob)
	job.Status.JobStatus = status
	must(w.kube.Update(ctx, job))
}

func (w *world) delete(ctx context.Context) { must(w.kube.Delete(ctx, w.launched(ctx))) }

// fail has the job's process end with that error document, which for the job is a success.
func (w *world) fail(ctx context.Context, left *core.ErrorDocument) { w.end(ctx, "/error.pb", left) }

func (w *world) succeed(ctx context.Context) {
	w.end(ctx, "/outputs.pb", &core.LiteralMap{Literals: map[string]*core.Literal{}})
}

// forget removes the error document that lies where this attempt has its outputs.
func (w *world) forget(ctx context.Context) {
	place := storage.DataReference(argument(w.launched(ctx).(*daskAPI.DaskJob), "--outputs-path") + "/error.pb")
	found, err := w.store.Head(ctx, place)
	must(err)
	if found.Exists() {
		must(w.store.Delete(ctx, place))
	}
}

func (w *world) end(ctx context.Context, name string, left proto.Message) {
	place := storage.DataReference(argument(w.launched(ctx).(*daskAPI.DaskJob), "--outputs-path") + name)
	must(w.store.WriteProtobuf(ctx, place, storage.Options{}, left))
	w.report(ctx, daskAPI.DaskJobSuccessful)
}
