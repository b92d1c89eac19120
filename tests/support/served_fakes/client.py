"""Stands in for `benchmarks.serving.client`: it makes results up, and fails where `faults.json` says so."""

import itertools
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from served_results import raw_result

from benchmarks.serving.client import ClientError, digest
from vllm_async_spec.json_child import serve

FOLDER = Path(os.environ["SERVED_FAKES"])
SPEED = {"stock": 1.0, "noop": 1.0, "plugin": 2.0}


class Client:
    def measure(self, arguments: list[str]) -> dict[str, Any]:
        options = dict(itertools.pairwise(arguments))
        arm, pid = (FOLDER / options["--base-url"].rpartition(":")[2]).read_text().split()
        load = Path(options["--dataset-path"]).stem.removeprefix("made-up-")
        if "--extra-body" in options:
            load = "seeded"
        with (FOLDER / "events").open("a") as events:
            print(load, arm, file=events)
        faults = json.loads((FOLDER / "faults.json").read_text())
        fault = faults.get(f"{load} {arm}", "")
        if fault == "hang":
            time.sleep(60)
        elif fault == "interrupt":
            os.kill(os.getppid(), signal.SIGINT)
            time.sleep(60)
        elif fault == "kill":
            os.kill(int(pid), signal.SIGKILL)
            return {"error": "no request was completed: ClientConnectorError"}
        requests = int(options["--num-prompts"])
        raw = raw_result(requests, SPEED[arm], failed=1 if fault == "fail" else 0)
        raw["generated_texts"] = [f"{number} {fault == 'tokens' and number < 3}" for number in range(requests)]
        try:
            return digest(raw)
        except ClientError as error:
            return {"error": str(error)}


if __name__ == "__main__":
    print("client", file=sys.stderr)
    serve(Client, "measure")
