// Command backend shows Flyte what we register, and prints what Flyte makes of it, as JSON.
//
//	backend flyte.yaml FOLDER
//
// FOLDER/PROFILE/*.pb is what `pyflyte package` writes, with project and version filled in. FOLDER/errors/*.pb is what
// attempts of the task FOLDER/errors/task have left, each for a series of such attempts.
package main

import (
	"context"
	"encoding/json"
	"log"
	"os"
	"path/filepath"
	"strings"

	"github.com/flyteorg/flyte/flyteidl/gen/pb-go/flyteidl/admin"
	"github.com/flyteorg/flyte/flyteidl/gen/pb-go/flyteidl/core"
	"github.com/flyteorg/flyte/flytestdlib/config"
	"github.com/flyteorg/flyte/flytestdlib/config/viper"
	"github.com/golang/protobuf/proto"

	// Plugins register themselves.
	_ "github.com/flyteorg/flyte/flyteplugins/go/tasks/plugins/array/k8s"
	_ "github.com/flyteorg/flyte/flyteplugins/go/tasks/plugins/k8s/dask"
	_ "github.com/flyteorg/flyte/flyteplugins/go/tasks/plugins/k8s/pod"
)

type result struct {
	Compiled  map[string][]string       `json:"compiled"`
	Resources map[string]map[string]any `json:"resources"`
	// What the console links to, by profile and task.
	Links    map[string]map[string][]string `json:"links"`
	Attempts map[string]course              `json:"attempts"`
}

func main() {
	ctx, folder := context.Background(), os.Args[2]
	accessor := viper.NewAccessor(config.Options{StrictMode: true, SearchPaths: []string{os.Args[1]}})
	must(accessor.UpdateConfig(ctx))
	found := result{Compiled: map[string][]string{}, Resources: map[string]map[string]any{}, Links: map[string]map[string][]string{}, Attempts: map[string]course{}}
	for _, file := range globbed(folder, "*", "*_1.pb") {
		profile := filepath.Dir(file)
		if name := filepath.Base(profile); found.Resources[name] == nil {
			registered := read(profile)
			found.Compiled[name] = registered.compile()
			found.Resources[name], found.Links[name] = registered.resources(ctx)
		}
	}
	task := load(filepath.Join(folder, "errors", "task"), &admin.TaskSpec{}).GetTemplate()
	for _, file := range globbed(folder, "errors", "*.pb") {
		left := load(file, &core.ErrorDocument{})
		found.Attempts[strings.TrimSuffix(filepath.Base(file), ".pb")] = attempts(ctx, task, func(w *world) { w.succeed(ctx, left) })
	}
	for name, end := range map[string]func(*world){
		"the job runner's pod fails":        func(w *world) { w.report(ctx, "Failed") },
		"it ends without outputs and error": func(w *world) { w.report(ctx, "Successful") },
		"somebody deletes the DaskJob":      func(w *world) { w.delete(ctx) },
		"it ends with outputs":              func(w *world) { w.succeed(ctx, &core.LiteralMap{Literals: defaults(task.GetInterface().GetOutputs())}) },
	} {
		found.Attempts[name] = attempts(ctx, task, end)
	}
	must(json.NewEncoder(os.Stdout).Encode(found))
}

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
