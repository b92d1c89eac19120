"""The shapes are the models that they are named after."""

import json

import pytest
import torch

from benchmarks.loads import LOADS, LoadError, find_loads, make_requests
from benchmarks.shapes import SHAPES, Method, ShapeError, find_shape, write_models


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_a_shape_has_its_number_of_parameters_and_those_of_its_experts(shape, tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.from_pretrained(write_models(shape, None, tmp_path).target)
    with torch.device("meta"):
        weights = dict(transformers.AutoModelForCausalLM.from_config(config).named_parameters())
    assert sum(weight.numel() for weight in weights.values()) == pytest.approx(shape.parameters, rel=0.03)
    routed = [weight.numel() for name, weight in weights.items() if ".mlp.experts." in name]
    assert shape.expert_parameters == pytest.approx(sum(routed), rel=5e-3)  # without biases, which gpt-oss has


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_drafters_have_the_targets_vocabulary_and_eagle_its_hidden_size(shape, tmp_path):
    for method in shape.drafters:
        models = write_models(shape, method, tmp_path)
        assert models.drafter is not None
        target, drafter = (json.loads((path / "config.json").read_text()) for path in (models.target, models.drafter))
        assert drafter["vocab_size"] == target["vocab_size"]
        assert not target["tie_word_embeddings"]
        if method is Method.EAGLE:
            assert (drafter["hidden_size"], drafter["num_hidden_layers"]) == (target["hidden_size"], 1)
        if method is Method.EAGLE3:  # its attention copies an embedding
            heads = (drafter["num_attention_heads"], drafter["num_key_value_heads"])
            assert {each * drafter["head_dim"] for each in heads} == {target["hidden_size"]}


def test_what_does_not_exist_is_named_with_what_does(tmp_path):
    with pytest.raises(ShapeError, match="there is no shape '2b'; there are 1b, 8b, moe"):
        find_shape("2b")
    with pytest.raises(ShapeError, match="shape 'mla' has no drafter for 'eagle'; it has mtp"):
        write_models(find_shape("mla"), Method.EAGLE, tmp_path)
    with pytest.raises(LoadError, match="there is no load 'decode-2'; there are decode-1"):
        find_loads(["decode-2"])


@pytest.mark.parametrize("load", LOADS.values(), ids=LOADS)
def test_requests_are_seeded_and_within_their_lengths(load):
    requests = make_requests(load, 1000)
    assert requests == make_requests(load, 1000)
    assert len(requests) == load.requests
    for request in requests:
        assert load.prompt[0] <= len(request.prompt) <= load.prompt[1]
        assert load.output[0] <= request.max_tokens <= load.output[1]
        assert max(request.prompt) < 1000
