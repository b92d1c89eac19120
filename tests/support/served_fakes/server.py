"""Stands in for `benchmarks.serving.server`: no vLLM, and faults as `faults.json` says (see `served`)."""

import json
import os
import sys
import time
from pathlib import Path

from vllm_async_spec.json_child import answering

FOLDER = Path(os.environ["SERVED_FAKES"])
STATES = {"stock": "not loaded", "noop": "off", "plugin": "on"}


def main() -> None:
    setup = json.loads(sys.argv[1])
    arm = setup["arm"]
    with (FOLDER / "events").open("a") as events:
        agent = " with the agent" if os.environ.get("VLLM_ASYNC_SPEC_AUDIT") else ""
        print(f"start {arm['name']}{agent}", file=events)
    fault = json.loads((FOLDER / "faults.json").read_text()).get(f"start {arm['name']}")
    with answering() as answer:
        if fault == "port":
            print("OSError: [Errno 98] error while attempting to bind on address", file=sys.stderr)
            sys.exit(1)
        if fault == "slow":
            time.sleep(60)
        (FOLDER / str(setup["port"])).write_text(f"{arm['name']} {os.getpid()}")
        answer({"ready": True, "seconds": 1.5})
        state = "on" if fault == "state" else STATES[arm["plugin"]]
        for _ in sys.stdin:
            facts = {"vllm": "0.32.0", "plugin": state, "runner": "V1", "backends": ["CPU_ATTN"]}
            facts |= {"async_scheduling": True, "graphs": "NONE", "all_reduce": "none"}
            compilation = {"mode": "VLLM_COMPILE", "backend": "inductor", "largest_graph": 512}
            hardware = {"device": os.environ.get("SERVED_DEVICE", "a device")}
            answer(facts | {"compilation": compilation, "hardware": hardware})
        time.sleep(0.01)


if __name__ == "__main__":
    main()
