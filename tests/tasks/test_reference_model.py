"""transformers' own model of a Kimi or DeepSeek checkpoint, as parity and the benchmark load it."""

from pathlib import Path
from types import ModuleType

import pytest
import torch

from slipstream.engine.errors import SlipstreamError
from slipstream.tasks.reference_model import reference_model, unpacked


@pytest.fixture(scope="module")
def kimi(load_test_module) -> ModuleType:
    return load_test_module(Path(__file__).parents[1] / "checkpoints" / "kimi.py")


@pytest.mark.parametrize("form", [{"int4": True, "wrapper": True}, {"int4": False, "wrapper": False}], ids=str)
def test_it_is_the_model_that_the_files_stand_for(kimi: ModuleType, tmp_path: Path, form: dict[str, bool]) -> None:
    """INT4 as the library that packed them unpacks them."""
    made = kimi.synthesise(tmp_path, **form)
    model = reference_model(tmp_path, torch.float32)
    ours, theirs = model.state_dict(), made.reference.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    ids = torch.arange(3, 40)[None]  # past where YaRN begins
    with torch.no_grad():
        expected = made.reference(ids).logits
        torch.testing.assert_close(model(ids).logits, expected, rtol=1e-4, atol=1e-4)
        assert reference_model(tmp_path, torch.bfloat16)(ids).logits.dtype == torch.bfloat16


def test_a_layer_that_predicts_further_tokens_is_left_out_and_others_are_not(kimi: ModuleType, tmp_path: Path) -> None:
    made = kimi.synthesise(tmp_path / "m", int4=False, wrapper=False)
    config = {**kimi._config(kimi.TEXT, False, None), "num_hidden_layers": 3}
    kimi.write(tmp_path / "cut", made.tensors, config)
    with pytest.raises(SlipstreamError, match=r"left over \['model\.layers\.3\."):
        reference_model(tmp_path / "cut", torch.float32)
    kimi.write(tmp_path / "mtp", made.tensors, {**config, "num_nextn_predict_layers": 1})
    assert reference_model(tmp_path / "mtp", torch.float32).config.num_hidden_layers == 3
    lost = {name: tensor for name, tensor in made.tensors.items() if name != "model.norm.weight"}
    kimi.write(tmp_path / "lost", lost, kimi._config(kimi.TEXT, False, None))
    with pytest.raises(SlipstreamError, match=r"missing \['model\.norm\.weight'\]"):
        reference_model(tmp_path / "lost", torch.float32)


def test_nibbles_by_hand() -> None:
    word = torch.tensor([[0xFEA98710 - 2**32]], dtype=torch.int32)  # the library's word for these
    values = unpacked(word, torch.tensor([[0.5, 2.0]]))
    assert values.tolist() == [[-4.0, -3.5, -0.5, 0.0, 2.0, 4.0, 12.0, 14.0]]
