"""A receiver of OpenTelemetry's metrics over HTTP, and the names that Prometheus gives to them."""

import contextlib
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

UNITS = {"s": "seconds", "": ""}
Values = dict[tuple[str, str, str], float]
"""Name in Prometheus, the model's index, and the figure's own label -> newest value."""


def name_in_prometheus(name: str, unit: str, *, is_counter: bool) -> str:
    """Return the name that Prometheus 3 makes of a metric's, by its default strategy of translation."""
    return "_".join(filter(None, (name.replace(".", "_"), UNITS[unit], "total" if is_counter else "")))


@contextlib.contextmanager
def receiver() -> Iterator[tuple[str, Values]]:
    """Yield the address of a receiver, and what it has received."""
    values: Values = {}

    class Receiver(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            request = ExportMetricsServiceRequest.FromString(self.rfile.read(int(self.headers["Content-Length"])))
            for each in (
                each for of in request.resource_metrics for scope in of.scope_metrics for each in scope.metrics
            ):
                is_counter = each.HasField("sum")
                name = name_in_prometheus(each.name, each.unit, is_counter=is_counter)
                for point in (each.sum if is_counter else each.gauge).data_points:
                    labels = {label.key: label.value.string_value for label in point.attributes}
                    del labels["training"]
                    values[name, labels.pop("model"), "".join(labels.values())] = point.as_double or point.as_int
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Receiver) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/v1/metrics", values
        server.shutdown()
