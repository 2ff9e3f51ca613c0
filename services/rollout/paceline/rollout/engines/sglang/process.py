"""The process of one tensor-parallel rank: SGLang's scheduler with Paceline's methods, and no tokenizer.

    python -m paceline.rollout.engines.sglang.process < a job in JSON

`link.py` starts it, sends it requests and calls its methods; `scheduler.py` has them.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from typing import Any

logger = logging.getLogger(__name__)


def main() -> None:
    """Reads the job from the standard input, and serves until the process is killed."""
    job: dict[str, Any] = json.load(sys.stdin)
    os.environ.update(job["environment"])
    from sglang.srt.plugins import load_plugins

    from paceline.rollout.engines.sglang import memory, sampler, tracing

    load_plugins()
    sampler.install()
    tracing.install()
    memory.install(job["share"])
    from sglang.srt.managers.scheduler import configure_scheduler_process
    from sglang.srt.server_args import PortArgs, ServerArgs

    from paceline.rollout.engines.sglang.scheduler import PacelineScheduler

    arguments, rank = ServerArgs(**job["arguments"]), int(job["rank"])
    arguments.check_server_args()
    arguments.override(source="paceline", sampling_backend=sampler.BACKEND)  # a CPU's default is another
    expert_rank = rank // (arguments.tp_size // arguments.ep_size)
    configure_scheduler_process(arguments, job["gpu_id"], rank, 0, 0, expert_rank, 0, None)
    ports = PortArgs(
        **job["ports"],
        detokenizer_ipc_name=job["ports"]["tokenizer_ipc_name"],
        metrics_ipc_name="",
        tokenizer_worker_ipc_name=None,
        decoupled_spec_ipc_config=None,
    )
    PacelineScheduler(arguments, ports, job["gpu_id"], rank, expert_rank, 0, 0, 0, None).run_event_loop()


if __name__ == "__main__":
    main()
