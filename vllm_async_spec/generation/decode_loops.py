"""The two decode loops side by side: `synchronous` reads a step's flags before the next launch, `interleaved` later."""

from __future__ import annotations

from vllm_async_spec.generation.decode import Decode
from vllm_async_spec.generation.flag_channel import FinishTracker, FlagChannel
from vllm_async_spec.generation.rollback import RngHistory
from vllm_async_spec.generation.slots import Slots
from vllm_async_spec.generation.stopping_criteria import HostCriteria
from vllm_async_spec.sync_policy import host_read


class UndrawnError(RuntimeError):
    """Nothing can be drawn from a step's scores. transformers raises a `RuntimeError` of `torch.multinomial` there."""

    def __init__(self) -> None:
        super().__init__(
            "no token can be drawn from a step's scores, because one of them is NaN or infinite; look at the model's "
            "weights and dtype (float16 overflows where bfloat16 does not), or pass do_sample=False"
        )


def synchronous(decode: Decode, host: HostCriteria, length: int) -> int:
    """Read the flags of each step before the next step is launched, and return where the last row stopped.

    Args:
        decode: after `begin`, so the first token of each sequence is written.
        host: the criteria that the host evaluates.
        length: of the sequences, the first token included.

    Raises:
        UndrawnError: scores of a step were no probabilities.
    """
    slot = 0
    while True:
        decode.judge(slot, length)
        # Host criteria run first, at every step, as in transformers: a clock may count its readings.
        stopped = host.stopped(length)
        with host_read("stop flags", decode.buffers.finished[slot].nbytes):
            stopped |= bool(decode.buffers.finished[slot].all())
            undrawn = decode.tail.do_sample and stopped and bool(decode.buffers.undrawn[slot])
        if stopped:
            if undrawn:
                raise UndrawnError
            return length
        slot = 1 - slot
        logits = decode.launch(slot, length)
        if logits is not None:
            decode.settle(slot, length, logits)
        length += 1


def interleaved(
    decode: Decode,
    host: HostCriteria,
    length: int,
    *,
    slots: Slots,
    channel: FlagChannel,
    watch: FinishTracker,
    trail: RngHistory | None,
) -> int:
    """Launch steps alternately in two slots, and read a step's flags while later steps run; see also `synchronous`.

    Args:
        decode: as in `synchronous`.
        host: as there.
        length: as there.
        slots: where the steps run.
        channel: has the side stream that evaluates flags, and carries them to the host.
        watch: sends and tracks flags through that channel.
        trail: states of the random generator; None if nothing is drawn.

    Returns:
        The length at which the last row stopped. Extra steps may have made the sequences longer; their random draws
        are undone.

    Raises:
        UndrawnError: as in `synchronous`.
    """
    slot, failed = 0, False
    slots.begin()
    try:
        with slots.step(slot):
            sent = _judge_beside(decode, slot, length, slots, channel, watch)
        while True:
            if trail is not None:
                trail.mark(length)
            if host.stopped(length):
                break
            if sent:
                watch.poll()
            if watch.finished_at is not None:
                break
            slot = 1 - slot
            with slots.step(slot):
                logits = decode.launch(slot, length)
                if logits is not None:
                    slots.await_judgement(1 - slot)
                    decode.settle(slot, length, logits)
                length += 1
                sent = _judge_beside(decode, slot, length, slots, channel, watch)
        watch.drain()
    except Exception:
        # `synchronous` launches no extra step, so what such a step raises is not the generation's error.
        if watch.drain() is None:
            raise
        failed = True
    finally:
        # Needed after an exception too: the next generation writes to the same buffers.
        slots.end()
        channel.join()
    finished_at = watch.finished_at or length
    if trail is not None and (failed or finished_at < length):
        trail.rewind(finished_at)
    if watch.failed:
        raise UndrawnError
    return finished_at


def _judge_beside(
    decode: Decode, slot: int, length: int, slots: Slots, channel: FlagChannel, watch: FinishTracker
) -> bool:
    """Evaluate and send the flags of the step just launched in `slot`; return whether any were sent."""
    with channel.beside():
        decode.judge(slot, length)
        sent = watch.record(decode.buffers.finished[slot], length, failed=decode.buffers.undrawn[slot])
        slots.flags_read(slot)
    return sent
