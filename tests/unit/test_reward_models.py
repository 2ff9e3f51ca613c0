"""Reward models with one score per sequence: the right template, the same scores in any batch, float32."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from paceline.core.errors import ConfigError
from paceline.core.scoring import ScoreItem
from paceline.reward.models.sequence import SequenceModel, SequenceModelOptions
from paceline.sdk import RewardClient, RewardServer

pytestmark = pytest.mark.torch

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}"


def save(folder: Path, *, num_labels: int = 1) -> str:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForSequenceClassification, PreTrainedTokenizerFast

    words = {chr(code): code for code in range(256)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="!")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=256, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, num_labels=num_labels, pad_token_id=33,
    )  # fmt: skip
    LlamaForSequenceClassification(config).save_pretrained(folder)
    return str(folder)


def items(*responses: str) -> list[ScoreItem]:
    return [
        ScoreItem(trajectory_id=f"t{index}", prompt="2 + 2?", response=response, ground_truth="")
        for index, response in enumerate(responses)
    ]


# "!" is the padding token: a model that looks for it takes the wrong position as the last.
RESPONSES = ("4", "it is four", "x" * 100, "!!!", "", "4!")


def test_scores_are_those_of_transformers_in_any_batch(tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    path = save(tmp_path)
    reference = AutoModelForSequenceClassification.from_pretrained(path)
    tokenizer = AutoTokenizer.from_pretrained(path)
    expected = []
    for response in RESPONSES:
        text = f"<user>2 + 2?</s><assistant>{response}</s>"
        ids = torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]])
        expected.append(reference(input_ids=ids).logits[0, 0].item())
    for max_batch_tokens in (1, 60, 10_000):
        model = SequenceModel(SequenceModelOptions(path=path, max_batch_tokens=max_batch_tokens))
        assert model(items(*RESPONSES)) == pytest.approx(expected, abs=1e-5)


def test_bfloat16_weights_give_float32_scores(tmp_path: Path) -> None:
    model = SequenceModel(SequenceModelOptions(path=save(tmp_path), dtype="bfloat16"))
    scores = model(items(*RESPONSES))
    assert any(float(torch.tensor(score).bfloat16()) != score for score in scores)


def test_a_model_with_two_labels_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has 2 labels: a reward model has one"):
        SequenceModel(SequenceModelOptions(path=save(tmp_path, num_labels=2)))


async def test_it_is_served_as_any_batch_function(tmp_path: Path) -> None:
    model = SequenceModel(SequenceModelOptions(path=save(tmp_path)))
    async with RewardServer(model, batch=True) as server, RewardClient(server.address) as client:
        results = await client.score(items(*RESPONSES))
    assert [result.reward for result in results] == pytest.approx(model(items(*RESPONSES)))
