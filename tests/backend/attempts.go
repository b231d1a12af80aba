package main

import (
	"context"
	"log"
	"slices"
	"strconv"

	daskAPI "github.com/dask/dask-kubernetes/v2023/dask_kubernetes/operator/go_client/pkg/apis/kubernetes.dask.org/v1"
	"github.com/flyteorg/flyte/flyteidl/gen/pb-go/flyteidl/core"
	"github.com/flyteorg/flyte/flytestdlib/storage"
	"github.com/golang/protobuf/proto"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// course is what becomes of a task all whose attempts end in the same way.
type course struct {
	Attempts []attempt `json:"attempts"`
	End      string    `json:"end"`
	Message  string    `json:"message,omitempty"`
}

type attempt struct {
	Job                string `json:"job"`
	OnSpot             bool   `json:"workers on spot machines"`
	Checkpoint         string `json:"checkpoint"`
	PreviousCheckpoint string `json:"previous checkpoint"`
	// What the console shows, one after the other.
	Phases []string `json:"phases"`
}

func attempts(ctx context.Context, task *core.TaskTemplate, end func(*world)) course {
	w, seen := newWorld(ctx, task), course{}
	for !w.isOver() && len(seen.Attempts) < maxAttempts {
		job := w.next(ctx, len(seen.Attempts))
		if job == nil {
			break
		}
		seen.Attempts = append(seen.Attempts, describe(job))
		for _, state := range []daskAPI.JobStatus{daskAPI.DaskJobCreated, daskAPI.DaskJobClusterCreated, daskAPI.DaskJobRunning} {
			w.report(ctx, state)
			w.round(ctx)
		}
		end(w)
		w.round(ctx)
	}
	for i := range seen.Attempts {
		seen.Attempts[i].Phases = w.phases[i]
	}
	seen.End = w.phase().String()
	if failed := w.execution.Status.Error; failed != nil {
		seen.Message = failed.GetMessage()
	}
	return seen
}

// next is the job of that attempt, or nil where the execution ends without it.
func (w *world) next(ctx context.Context, number int) *daskAPI.DaskJob {
	for range maxRounds {
		for _, object := range w.launched(ctx) {
			if job := object.(*daskAPI.DaskJob); variable(job, "FLYTE_ATTEMPT_NUMBER") == strconv.Itoa(number) {
				w.job = job
				return job
			}
		}
		if w.isOver() {
			return nil
		}
		w.round(ctx)
	}
	log.Panicf("nothing happens: %v", w.execution.Status)
	return nil
}

func describe(job *daskAPI.DaskJob) attempt {
	return attempt{
		Job:                job.Name,
		OnSpot:             job.Spec.Cluster.Spec.Worker.Spec.NodeSelector["example.com/spot"] == "true",
		Checkpoint:         argument(job, "--checkpoint-path"),
		PreviousCheckpoint: argument(job, "--prev-checkpoint"),
	}
}

func variable(job *daskAPI.DaskJob, name string) string {
	for _, pair := range job.Spec.Job.Spec.Containers[0].Env {
		if pair.Name == name {
			return pair.Value
		}
	}
	return ""
}

func argument(job *daskAPI.DaskJob, name string) string {
	given := job.Spec.Job.Spec.Containers[0].Args
	return given[slices.Index(given, name)+1]
}

// report says of the job what the operator would.
func (w *world) report(ctx context.Context, status daskAPI.JobStatus) {
	must(w.kube.Get(ctx, client.ObjectKeyFromObject(w.job), w.job))
	w.job.Status.JobStatus = status
	must(w.kube.Update(ctx, w.job))
}

func (w *world) delete(ctx context.Context) { must(w.kube.Delete(ctx, w.job)) }

// succeed has the job's process end with that file, which for it is a success: an error document, or outputs.
func (w *world) succeed(ctx context.Context, left proto.Message) {
	name := "/outputs.pb"
	if _, failed := left.(*core.ErrorDocument); failed {
		name = "/error.pb"
	}
	place := storage.DataReference(argument(w.job, "--output-prefix") + name)
	must(w.store.WriteProtobuf(ctx, place, storage.Options{}, left))
	w.report(ctx, daskAPI.DaskJobSuccessful)
}
