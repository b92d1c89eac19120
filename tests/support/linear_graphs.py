"""What a CUDA graph of decoding reads of linear attention, for engines without graphs."""

import copy
from collections.abc import Callable
from typing import Any

import torch


def noting(dispatch: Callable[..., Any], decodes: list[bool]) -> Callable[..., Any]:
    """vLLM's `CudagraphDispatcher.dispatch`, which adds to a list whether vLLM takes the step for decoding."""

    def dispatched(*args: Any, **kwargs: Any) -> Any:
        decodes.append(kwargs["uniform_decode"])
        return dispatch(*args, **kwargs)

    return dispatched


def writes_as_for_graphs(builder: Any) -> None:
    """Make a `GDNAttentionMetadataBuilder` write to its own tensors, which hold what a capture leaves."""
    builder.use_full_cuda_graph = True
    for tensor in (builder.spec_state_indices_tensor, builder.num_accepted_tokens):
        tensor.zero_()


def captured(builder: Any, made: Any, requests: int) -> Any:
    """The metadata with which a graph of this batch size was captured: the builder's own tensors, whatever it made."""
    tokens = builder.num_spec + 1
    device = builder.spec_state_indices_tensor.device
    graph = copy.copy(made)
    graph.num_prefills = graph.num_prefill_tokens = graph.num_decodes = graph.num_decode_tokens = 0
    graph.num_spec_decodes, graph.num_spec_decode_tokens = requests, requests * tokens
    graph.spec_state_indices_tensor = builder.spec_state_indices_tensor[:requests]
    graph.num_accepted_tokens = builder.num_accepted_tokens[:requests]
    graph.spec_query_start_loc = torch.arange(requests + 1, dtype=torch.int32, device=device) * tokens
    graph.spec_sequence_masks = torch.ones(requests, dtype=torch.bool, device=device)
    graph.spec_token_indx = torch.arange(requests * tokens, dtype=torch.int32, device=device)
    graph.non_spec_token_indx = graph.spec_token_indx[:0]
    graph.non_spec_query_start_loc = graph.non_spec_state_indices_tensor = graph.has_initial_state = None
    return graph
