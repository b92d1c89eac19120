"""Audit reports to show and to test with: one that waits, the same load without its waits, and one made on a CPU."""

from dataclasses import replace

from vllm_async_spec.audit.report import (
    Cause,
    DeviceTime,
    EngineFacts,
    Frame,
    Gap,
    Item,
    Lane,
    Load,
    Overhead,
    Phase,
    PhaseTime,
    Place,
    Report,
    Spread,
    Timeline,
    WaitKind,
)

RUNNER = "vllm/v1/worker/gpu_model_runner.py"
FLASHINFER = "vllm/v1/attention/backends/flashinfer.py"

STEP = Frame("vllm/v1/engine/core.py", 431, "step_with_batch_queue", "exec_future = self.model_executor.execute_model(")
EXECUTE = Frame(RUNNER, 3655, "execute_model", "attn_metadata, spec_decode_common = self._build_attention_metadata(")
BUILD = Frame(RUNNER, 2051, "_build_attention_metadata", "_build_attn_group_metadata(kv_cache_gid, attn_gid, cm)")
PLAN = Frame(FLASHINFER, 1020, "build", "seq_lens_cpu = common_attn_metadata.seq_lens_cpu")
INDPTR = Frame(FLASHINFER, 884, "_compute_flashinfer_kv_metadata", "self.paged_kv_indices.copy_(indices, True)")
ACCEPTED = Frame(RUNNER, 4221, "_get_valid_sampled_token_count", "sampled_count_event.synchronize()")
UPDATE = Frame(RUNNER, 1112, "_update_states", "valid_sampled_token_count = self._get_valid_sampled_token_count()")
OUTPUT = Frame(RUNNER, 261, "get_output", "self.async_copy_ready_event.synchronize()")


def waiting() -> Report:
    """Asynchronous scheduling on the V1 runner that waits twice a step."""
    planned, updated = (PLAN, BUILD, EXECUTE, STEP), (ACCEPTED, UPDATE, EXECUTE, STEP)
    return Report(
        headline="The host waits on the critical path",
        sentence=f"Most waits are at {PLAN}; to change: build from device seq_lens or seq_lens_cpu_upper_bound.",
        engine=_engine(plugin="off"),
        load=Load("64 chat prompts, 256 tokens each", requests=64, tokens_per_second=9412.0, acceptance_length=2.61),
        steps=412,
        step_ms=Spread(n=412, median=13.02, p10=12.71, p90=13.66),
        overhead=Overhead(
            Spread(40, 12.18, 11.96, 12.57), Spread(40, 12.31, 12.02, 12.7), Spread(40, 13.02, 12.71, 13.66)
        ),
        simulated=False,
        causes=(
            Cause(WaitKind.COPY_TO_HOST, Place.CRITICAL, "worker", Phase.METADATA, planned, 1.0, 3.1, 3.84),
            Cause(WaitKind.EVENT, Place.CRITICAL, "worker", Phase.INPUTS, updated, 1.0, 0.92, 1.31),
            Cause(WaitKind.PAGEABLE, Place.OVERLAPPED, "worker", Phase.METADATA, (INDPTR, *planned), 2.0, 0.06, 0.09),
            Cause(WaitKind.EVENT, Place.HIDDEN, "async output", Phase.OUTPUT, (OUTPUT,), 1.0, 8.77, 9.4),
            Cause(WaitKind.STREAM, Place.HIDDEN, "cupti-flush", Phase.OTHER, (), 0.02, 0.004, 0.21),
        ),
        phases=(
            PhaseTime(Phase.SCHEDULING, "worker", 0.55, 0.0, 0.71),
            PhaseTime(Phase.INPUTS, "worker", 1.68, 0.92, 2.35),
            PhaseTime(Phase.METADATA, "worker", 3.92, 3.16, 61.4),
            PhaseTime(Phase.LAUNCH, "worker", 2.61, 0.0, 3.18),
            PhaseTime(Phase.SAMPLING, "worker", 0.71, 0.0, 0.94),
            PhaseTime(Phase.DRAFTING, "worker", 2.93, 0.0, 3.66),
            PhaseTime(Phase.OUTPUT, "worker", 0.38, 0.0, 0.52),
            PhaseTime(Phase.OTHER, "worker", 0.24, 0.0, 0.4),
            PhaseTime(Phase.OUTPUT, "async output", 9.31, 8.77, 10.2),
        ),
        gpu=DeviceTime(
            busy=0.658,
            launch_gaps=0.031,
            host_idle=0.311,
            kernels_per_step=641.5,
            host_gaps_per_step=5.25,
            gaps=(
                Gap(41_210.4, 2870.6, f"metadata building 58 %, waiting at {PLAN} 31 %, launch 11 %"),
                Gap(93_455.0, 2755.1, f"metadata building 61 %, waiting at {PLAN} 29 %, launch 10 %"),
                Gap(67_333.2, 1240.8, f"input preparation 71 %, waiting at {ACCEPTED} 29 %"),
            ),
        ),
        timeline=_timeline(wait=True),
        notes=(
            "3 of 412 steps had a prefill and are not in the per-step figures.",
            "Waits inside libraries are seen by their kernels' records only: 8 of them had no Python call.",
        ),
        command="vllm-async-spec audit --model meta-llama/Llama-3.1-8B-Instruct --runner v1 --html audit.html -- "
        '--speculative-config \'{"method": "eagle", "num_speculative_tokens": 3}\'',
        date="2026-11-21 04:12 UTC",
    )


def flowing() -> Report:
    """The same engine and load with the plugin: no critical wait is left."""
    before = waiting()
    pageable, output, flush = before.causes[2:]
    return replace(
        before,
        headline="Nothing waits, but host work leaves the GPU idle",
        sentence="The idle time is host work, not waits: drafting takes most of it.",
        engine=_engine(plugin="on: 5 patches applied, 4 not needed"),
        load=replace(before.load, tokens_per_second=12_880.0),
        step_ms=Spread(n=431, median=9.51, p10=9.3, p90=9.98),
        steps=431,
        overhead=Overhead(Spread(40, 8.9, 8.71, 9.22), Spread(40, 9.0, 8.77, 9.31), Spread(40, 9.51, 9.3, 9.98)),
        causes=(pageable, replace(output, ms_per_step=5.2, longest_ms=6.02), flush),
        phases=tuple(
            replace(p, ms_per_step=p.ms_per_step - p.waiting_ms_per_step, waiting_ms_per_step=0.0)
            if p.thread == "worker" and p.phase is Phase.INPUTS
            else replace(p, ms_per_step=0.84, waiting_ms_per_step=0.06)
            if p.phase is Phase.METADATA
            else replace(p, ms_per_step=5.71, waiting_ms_per_step=5.2)
            if p.thread == "async output"
            else p
            for p in before.phases
        ),
        gpu=DeviceTime(
            busy=0.921,
            launch_gaps=0.044,
            host_idle=0.035,
            kernels_per_step=642.0,
            host_gaps_per_step=1.5,
            gaps=(Gap(12_006.5, 214.2, "scheduling 80 %, input preparation 20 %"),),
        ),
        timeline=_timeline(wait=False),
        notes=before.notes[:1],
        command=before.command.replace("audit --model", "audit --plugin --model"),
        date="2026-11-21 04:31 UTC",
    )


def simulated() -> Report:
    """What an audit on a CPU finds: counts, and no times."""
    real = waiting()
    return replace(
        real,
        headline="On a GPU the host would wait on the critical path",
        sentence=f"Most waits are at {ACCEPTED}; to change: have the device carry the value to the next step.",
        engine=replace(
            real.engine,
            device="CPU",
            driver="",
            backends=("CPU_ATTN",),
            builders=("CPUAttentionMetadataBuilder",),
            graphs="none",
        ),
        overhead=None,
        simulated=True,
        causes=tuple(replace(cause, ms_per_step=0.0, longest_ms=0.0) for cause in real.causes if cause.stack),
        phases=(),
        gpu=None,
        timeline=None,
        notes=("Kernels of a CPU attention backend are not those of a GPU.",),
        command="vllm-async-spec audit --model .cache/demo/target --html audit.html",
    )


def _engine(plugin: str) -> EngineFacts:
    return EngineFacts(
        vllm="0.18.1",
        torch="2.10.0+cu130",
        device="NVIDIA H200",
        driver="driver 580.159, CUDA 13.0",
        python="3.12.9",
        model="meta-llama/Llama-3.1-8B-Instruct",
        runner="V1",
        backends=("FLASHINFER",),
        builders=("FlashInferMetadataBuilder",),
        async_scheduling=True,
        decided_by="vLLM's default for EAGLE",
        speculation="eagle, K = 3",
        graphs="FULL_AND_PIECEWISE",
        plugin=plugin,
        processes="engine core and worker in one process",
    )


def _timeline(*, wait: bool) -> Timeline:
    """Consecutive steps of one shape: with the waits the device stands still while the host catches up."""
    host: list[Item] = []
    output: list[Item] = []
    compute: list[Item] = []
    copies: list[Item] = []
    starts = []
    now = 0.0
    for step in range(4):
        starts.append(now)
        shift = 35.0 * (step % 3)
        now = _host_step(host, now, shift, wait=wait)
        begin, end = starts[-1], now
        idle = 2870.0 if wait else 214.0
        compute += [
            Item(begin, idle, "gap", "idle"),
            Item(begin + idle, 1105.0, "kernels", "96 kernels"),
            Item(begin + idle + 1105, 4.5, "gap", "idle"),
            Item(begin + idle + 1109.5, end - begin - idle - 1109.5, "kernels", "546 kernels"),
        ]
        copies += [
            Item(begin + idle + 420, 18.0, "copy", "to device, 6 KiB"),
            Item(end - 260, 24.0, "copy", "to host, 2 KiB"),
        ]
        output += [
            Item(begin + 120, end - begin - 300, "output", "get_output"),
            Item(begin + 140, end - begin - 780, "wait", "event", str(OUTPUT)),
        ]
    lanes = (
        Lane("worker", False, tuple(host)),
        Lane("async output", False, tuple(output)),
        Lane("stream 7", True, tuple(compute)),
        Lane("stream 21", True, tuple(copies)),
    )
    return Timeline(us=now, steps_us=tuple(starts), lanes=lanes)


def _host_step(host: list[Item], now: float, shift: float, *, wait: bool) -> float:
    inputs, metadata = (1680.0, 3920.0) if wait else (760.0, 840.0)
    for kind, label, us, waits in (
        ("scheduling", "schedule", 550.0 + shift, ()),
        ("input preparation", "_prepare_inputs", inputs, ((90.0, 920.0, "event", ACCEPTED, True),) if wait else ()),
        (
            "metadata building",
            "build",
            metadata,
            ((240.0, 3100.0, "copy to host", PLAN, True), (3420.0, 60.0, "pageable copy", INDPTR, False))
            if wait
            else ((520.0, 60.0, "pageable copy", INDPTR, False),),
        ),
        ("launch", "forward", 2610.0 + 2 * shift, ()),
        ("sampling", "sample_tokens", 710.0, ()),
        ("drafting", "propose", 2930.0, ()),
        ("output", "bookkeeping", 380.0, ()),
    ):
        host.append(Item(now, us, kind, label))
        host += [
            Item(now + start, length, "wait", what, str(at), critical) for start, length, what, at, critical in waits
        ]
        now += us
    return now + 240.0
