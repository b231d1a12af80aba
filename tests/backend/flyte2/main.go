// Command flyte2 shows Flyte 2's executor tasks of ours, and prints what it makes of them, as JSON.
//
//	flyte2 flyte.yaml FOLDER
//
// FOLDER/*.pb are task templates. FOLDER/errors/*.pb is what attempts of the task FOLDER/errors/task have left.
package main

import (
	"context"
	"encoding/json"
	"log"
	"os"
	"path/filepath"
	"strings"

	"google.golang.org/protobuf/proto"

	"github.com/flyteorg/flyte/v2/flytestdlib/config"
	"github.com/flyteorg/flyte/v2/flytestdlib/config/viper"
	"github.com/flyteorg/flyte/v2/gen/go/flyteidl2/core"

	// Plugins register themselves.
	_ "github.com/flyteorg/flyte/v2/flyteplugins/go/tasks/plugins/k8s/dask"
	_ "github.com/flyteorg/flyte/v2/flyteplugins/go/tasks/plugins/k8s/pod"
)

type result struct {
	Resources map[string]any    `json:"resources"`
	Attempts  map[string]course `json:"attempts"`
}

func main() {
	ctx, folder := context.Background(), os.Args[2]
	accessor := viper.NewAccessor(config.Options{SearchPaths: []string{os.Args[1]}})
	must(accessor.UpdateConfig(ctx))
	found := result{Resources: map[string]any{}, Attempts: map[string]course{}}
	for _, file := range globbed(folder, "*.pb") {
		w := newWorld(ctx, load(file, &core.TaskTemplate{}))
		w.reconcile(ctx, 2) // a finalizer first, then what runs the task
		found.Resources[stem(file)] = plain(w.launched(ctx))
	}
	task := load(filepath.Join(folder, "errors", "task"), &core.TaskTemplate{})
	for _, file := range globbed(folder, "errors", "*.pb") {
		left, what := load(file, &core.ErrorDocument{}), stem(file)
		found.Attempts[what] = attempts(ctx, task, func(w *world, _ int) { w.fail(ctx, left) })
		found.Attempts[what+", once"] = attempts(ctx, task, func(w *world, number int) {
			if number == 0 {
				w.fail(ctx, left)
				return
			}
			w.forget(ctx) // as our tasks do at their start
			w.succeed(ctx)
		})
		found.Attempts[what+", once, and its error stays"] = attempts(ctx, task, func(w *world, number int) {
			if number == 0 {
				w.fail(ctx, left)
				return
			}
			w.succeed(ctx)
		})
	}
	for name, end := range map[string]func(*world, int){
		"the job runner's pod fails":    func(w *world, _ int) { w.report(ctx, "Failed") },
		"somebody deletes the DaskJob":  func(w *world, _ int) { w.delete(ctx) },
		"it ends with outputs":          func(w *world, _ int) { w.succeed(ctx) },
		"it ends without anything left": func(w *world, _ int) { w.report(ctx, "Successful") },
	} {
		found.Attempts[name] = attempts(ctx, task, end)
	}
	must(json.NewEncoder(os.Stdout).Encode(found))
}

func stem(file string) string { return strings.TrimSuffix(filepath.Base(file), ".pb") }

func globbed(parts ...string) []string {
	files, err := filepath.Glob(filepath.Join(parts...))
	must(err)
	return files
}

func load[M proto.Message](file string, message M) M {
	content, err := os.ReadFile(file)
	must(err)
	must(proto.Unmarshal(content, message))
	return message
}

func must(err error) {
	if err != nil {
		log.Panic(err)
	}
}
