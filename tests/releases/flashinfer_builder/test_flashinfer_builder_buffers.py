"""What vLLM's FlashInfer builder copies from with the plugin."""

from typing import Any

import fake_flashinfer
import pytest
import torch
from flashinfer_built import BATCHES, DRAFTS, PAGE, built_on_device, metadata, metadata_of, wrappers

from vllm_async_spec.compat import builders


def test_two_plans_in_flight_share_no_buffer(builder: Any):
    given = metadata_of("ragged and a prefill")
    addresses = []
    for _ in range(3):
        built = builder.build(0, given)
        addresses += [each.plans[-1]["buffer"].data_ptr() for each in wrappers(built)]
    assert addresses
    assert len(set(addresses)) == len(addresses)


def test_each_buffer_is_fenced_behind_its_plan_and_before_another_is_lent(
    builder: Any, module: Any, monkeypatch: pytest.MonkeyPatch
):
    ring, happened = builder._plan_buffers._ring, []
    lend, fence, plan, fast_plan = ring.next, ring.fence, fake_flashinfer.Wrapper.plan, module.fast_decode_plan

    def lent() -> torch.Tensor:
        buffer: torch.Tensor = lend()
        happened.append(("lent", buffer.data_ptr()))
        return buffer

    def fenced() -> None:
        happened.append(("fenced", ring._buffers[ring._turn].data_ptr()))
        fence()

    def planning(original: Any) -> Any:
        def planned(wrapper: Any, *args: Any, **kwargs: Any) -> None:
            happened.append(("planned", wrapper._pin_memory_int_workspace_buffer.data_ptr()))
            original(wrapper, *args, **kwargs)

        return planned

    monkeypatch.setattr(ring, "next", lent)
    monkeypatch.setattr(ring, "fence", fenced)
    monkeypatch.setattr(fake_flashinfer.Wrapper, "plan", planning(plan))
    monkeypatch.setattr(module, "fast_decode_plan", planning(fast_plan))
    for batch in ("ragged and a prefill", "one token each", "one token each", "drafts"):
        built = builder.build(0, metadata_of(batch))
        assert len(happened) % 3 == 0, "a build ends with a buffer that is not fenced"
        assert bool(happened) or built_on_device(built)
    for at in range(0, len(happened), 3):
        assert [what for what, _ in happened[at : at + 3]] == ["lent", "planned", "fenced"]
        assert len({buffer for _, buffer in happened[at : at + 3]}) == 1


@pytest.fixture
def copies(module: Any, monkeypatch: pytest.MonkeyPatch) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Each pinned source of a copy to the device or of a plan, and its contents."""
    pinned: dict[int, torch.Tensor] = {}
    sources: list[tuple[torch.Tensor, torch.Tensor]] = []
    copy, plan, is_pinned = torch.Tensor.copy_, fake_flashinfer.Wrapper.plan, torch.Tensor.is_pinned

    def pin(tensor: torch.Tensor) -> torch.Tensor:
        pinned[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    def known(tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in pinned

    def pinning(make: Any) -> Any:
        def made(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
            return pin(make(*args, **kwargs)) if pin_memory else make(*args, **kwargs)

        return made

    def copy_(self: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        if non_blocking and known(source):
            sources.append((source, source.clone()))
        return copy(self, source)

    def planned(self: Any, *args: Any, **kwargs: Any) -> None:
        given = [each for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor) and known(each)]
        sources.extend((each, each.clone()) for each in given)
        plan(self, *args, **kwargs)

    for name in ("zeros", "zeros_like"):
        monkeypatch.setattr(torch, name, pinning(getattr(torch, name)))
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: pin(self.clone()))
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda self: known(self) or is_pinned(self))
    monkeypatch.setattr(torch.Tensor, "copy_", copy_)
    monkeypatch.setattr(fake_flashinfer.Wrapper, "plan", planned)
    monkeypatch.setattr(module, "PIN_MEMORY", True, raising=False)
    monkeypatch.setattr(module, "is_pin_memory_available", lambda: True, raising=False)
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    return sources


@pytest.mark.parametrize("batch", BATCHES)
def test_no_build_writes_what_a_copy_may_not_have_read(
    module: Any, setting: tuple[Any, ...], kind: str, batch: str, copies: list[tuple[torch.Tensor, torch.Tensor]]
):
    builder = module.FlashInferBackend.get_builder_cls()(*setting)
    query, exact = BATCHES[batch]
    builder.build(0, metadata(query, exact, DRAFTS))
    builder.build(0, metadata(query, [length + 3 * PAGE - 1 for length in exact], 17))
    for source, contents in copies:
        assert torch.equal(source, contents)


def test_upstreams_buffers_are_written_while_they_are_copied_under_the_v1_runner(
    module: Any, release: str, kind: str, copies: list[tuple[torch.Tensor, torch.Tensor]]
):
    """The reason for pageable buffers; in stock the wait for exact lengths stands between two builds."""
    with builders.flashinfer_setting(spec_tokens=DRAFTS, block_size=PAGE, trtllm=False) as setting:
        builder = module.FlashInferMetadataBuilder(*setting)
        for more in (0, 3 * PAGE - 1):
            given = builders.common_metadata([1, 1, 1], [33 + more, 1 + more, 48 + more], host=True)
            builder.build(0, given)
    overtaken = [source for source, contents in copies if not torch.equal(source, contents)]
    assert bool(overtaken) is (tuple(map(int, release.split("."))) < (0, 29))
