"""What an engine can ask of each of its vLLM workers."""

from __future__ import annotations

from typing import Any

from megarl.rollout.cpu_workers import RoutingRecorder, complete


class WorkerExtension:
    """Mixed into vLLM's worker (`worker_extension_cls`): what `collective_rpc` can call."""

    def megarl_complete(self) -> None:
        """Do what vLLM leaves out where an engine has several workers."""
        complete(self)

    def megarl_other_formats(self) -> list[str]:
        """Describe quantised parameters that no sync could write."""
        worker: Any = self
        return worker.weight_transfer_engine.other_formats()

    def megarl_take_weights(self, manifest: dict[str, Any], engine: int) -> dict[str, float] | tuple[bool, str, bool]:
        """Take a version in one call: vLLM's three calls would each ask all of an engine's processes. Returns the version
        and the report; or after a failure whether another process caused it, the message, and whether a deadline passed."""
        worker: Any = self
        worker.start_weight_update()
        worker.update_weights({"manifest": manifest, "engine": engine})
        worker.finish_weight_update()
        return worker.weight_transfer_engine.report

    def megarl_record_routing(self) -> None:
        """Record the experts that tokens choose, until they are taken."""
        self.megarl_routing = RoutingRecorder(self.model_runner)  # type: ignore[attr-defined]

    def megarl_take_routing(self, requests: list[str], aborted: list[str]) -> list[tuple[bytes, tuple[int, ...]]]:
        """Return the experts of finished requests (`RoutingRecorder.take`), and forget those of aborted ones."""
        for request in aborted:
            self.megarl_routing.drop(request)
        return [self.megarl_routing.take(request) for request in requests]
