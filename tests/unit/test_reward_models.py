"""Reward models with one score per sequence: the right template, the same scores in any batch, float32."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from paceline.config.reward import RewardConfig, RewardModelConfig
from paceline.core.errors import ConfigError, ModelError, RewardError, RewardErrorKind
from paceline.core.scoring import ScoreItem
from paceline.launch.planning.plan import reward_model
from paceline.reward.models import __main__ as reward_models
from paceline.reward.models.generative import GenerativeModel
from paceline.reward.models.model import ModelOptions, TokenRow
from paceline.reward.models.process import ProcessModel, step_ends
from paceline.reward.models.sequence import SequenceModel
from paceline.reward.models.version import folder_version
from paceline.reward.scoring.scorer import ScorerSettings
from paceline.reward.weighted_sum import WeightedSum
from paceline.sdk import RewardClient, RewardServer
from support.cli_configs import config
from support.forked import Forked, run
from support.training_run import ENGINE

pytestmark = pytest.mark.torch

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}"


def save(
    folder: Path, *, num_labels: int = 1, hidden_size: int = 32, num_heads: int = 4, family: str = "Llama"
) -> str:
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {chr(code): code for code in range(256)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="!")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    torch.manual_seed(1)
    config = getattr(transformers, f"{family}Config")(
        vocab_size=256, hidden_size=hidden_size, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=num_heads, num_key_value_heads=2, max_position_embeddings=512,
        num_labels=num_labels, pad_token_id=33, attention_dropout=0.5,
    )  # fmt: skip
    getattr(transformers, f"{family}ForSequenceClassification")(config).save_pretrained(folder)
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
        model = SequenceModel(ModelOptions(path=path, max_batch_tokens=max_batch_tokens))
        assert model(items(*RESPONSES)) == pytest.approx(expected, abs=1e-5)


def test_the_folders_own_tokenizer_counts_and_not_its_familys(tmp_path: Path) -> None:
    """transformers' own choice for Qwen's models is a byte-level tokenizer, whatever tokenizer.json says."""
    from tokenizers import Tokenizer
    from transformers import AutoModelForSequenceClassification

    path = save(tmp_path, family="Qwen2")
    text = "<user>2 + 2?</s><assistant>it is four</s>"
    ids = torch.tensor([Tokenizer.from_file(f"{path}/tokenizer.json").encode(text).ids])
    expected = AutoModelForSequenceClassification.from_pretrained(path)(input_ids=ids).logits[0, 0].item()
    assert SequenceModel(ModelOptions(path=path))(items("it is four")) == pytest.approx([expected], abs=1e-5)


def test_an_exchange_without_a_token_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = SequenceModel(ModelOptions(path=save(tmp_path)))
    monkeypatch.setattr(model, "_row", lambda item: TokenRow(token_ids=[5] if item.response else []))
    with pytest.raises(
        ModelError, match=r"has no token for the prompt '2 \+ 2\?' and its answer; save the one"
    ):
        model(items("4", ""))
    assert len(model(items("4", "5"))) == 2


def test_bfloat16_weights_give_float32_scores(tmp_path: Path) -> None:
    model = SequenceModel(ModelOptions(path=save(tmp_path), dtype="bfloat16"))
    scores = model(items(*RESPONSES))
    assert any(float(torch.tensor(score).bfloat16()) != score for score in scores)


def test_a_quantised_model_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path / "model")
    judge = save_judge(tmp_path / "judge")
    for folder, make in (
        (Path(path), lambda: SequenceModel(ModelOptions(path=path))),
        (Path(judge.path), lambda: GenerativeModel(judge)),
    ):
        config = json.loads((folder / "config.json").read_text())
        config["quantization_config"] = {"quant_method": "fp8"}
        (folder / "config.json").write_text(json.dumps(config))
        with pytest.raises(ModelError, match=r"is quantised: .*\(fp8\).*bfloat16 copy"):
            make()


def test_a_model_with_two_labels_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has 2 labels: a reward model has one"):
        SequenceModel(ModelOptions(path=save(tmp_path, num_labels=2)))


@pytest.mark.vllm
@pytest.mark.timeout(900)
@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")
async def test_vllm_gives_the_scores_of_transformers(tmp_path: Path) -> None:
    """As a process with `--engine vllm`; a row longer than the model loses its beginning in both."""
    path = save(tmp_path, hidden_size=128, num_heads=2)
    rows = items(*RESPONSES, "y" * 2000, *("z" * number for number in range(40)))
    command = ["-m", "paceline.reward.models", path, "--port", "0", "--engine", "vllm"]
    process = Forked(command, stderr=subprocess.PIPE, imports=ENGINE)
    assert process.stderr is not None
    lines: list[str] = []
    try:
        for line in process.stderr:
            lines.append(line)
            if address := re.search(r"reward server on (\S+)", line):
                break
        assert address is not None, "".join(lines)
        async with RewardClient(address[1]) as client:
            together = await client.score(rows)
            alone = [result for row in rows[:8] for result in await client.score([row])]
    finally:
        process.terminate()
        process.communicate()
    wanted = SequenceModel(ModelOptions(path=path))(rows)
    assert max(wanted) - min(wanted) > 0.1
    assert [result.reward for result in together] == pytest.approx(wanted, abs=1e-4)
    assert [result.reward for result in alone] == pytest.approx(wanted[:8], abs=1e-4)


async def test_it_is_served_as_any_batch_function(tmp_path: Path) -> None:
    model = SequenceModel(ModelOptions(path=save(tmp_path)))
    async with RewardServer(model, batch=True) as server, RewardClient(server.address) as client:
        results = await client.score(items(*RESPONSES))
    assert [result.reward for result in results] == pytest.approx(model(items(*RESPONSES)))


async def test_two_reward_services_share_the_process_of_a_model(tmp_path: Path) -> None:
    """`python -m paceline.reward.models PATH --port`: neither of them loads a model."""
    path = save(tmp_path)
    command = ["-m", "paceline.reward.models", path, "--port", "0"]
    process = Forked(command, stderr=subprocess.PIPE)
    assert process.stderr is not None
    try:
        said = iter(process.stderr.readline, "")
        address = next(filter(None, (re.search(r"reward server on (\S+)", line) for line in said)))
        service = {"name": "rm", "address": address[1], "concurrency": 1, "timeout_s": 120.0}
        reward = RewardConfig.model_validate({"services": [service]})
        totals = [WeightedSum.configured(ScorerSettings(config=reward)) for _ in range(2)]
        await asyncio.gather(*(total.start() for total in totals))
        rows = [items(*RESPONSES[:3]), items(*RESPONSES[3:])]
        scored = await asyncio.gather(*(total.score(row) for total, row in zip(totals, rows, strict=True)))
        await asyncio.gather(*(total.close() for total in totals))
    finally:
        process.terminate()
        await asyncio.to_thread(process.communicate)
    given = [score.reward for scores in scored for score in scores]
    assert given == pytest.approx(SequenceModel(ModelOptions(path=path))(items(*RESPONSES)), abs=1e-5)


def save_process(folder: Path) -> str:
    from transformers import LlamaConfig, LlamaForTokenClassification

    save(folder)
    torch.manual_seed(2)
    config = LlamaConfig(
        vocab_size=256, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, num_labels=1, pad_token_id=33,
    )  # fmt: skip
    LlamaForTokenClassification(config).save_pretrained(folder)
    return str(folder)


def test_a_process_model_scores_the_end_of_each_step_in_any_batch(tmp_path: Path) -> None:
    from transformers import AutoModelForTokenClassification, AutoTokenizer

    path = save_process(tmp_path)
    response = "one\n\ntwo\nthree"
    ends = (5, 9, 14)
    text = f"<user>2 + 2?</s><assistant>{response}</s>"
    ids = torch.tensor([AutoTokenizer.from_pretrained(path)(text, add_special_tokens=False)["input_ids"]])
    logits = AutoModelForTokenClassification.from_pretrained(path)(input_ids=ids).logits[0, :, 0]
    start = text.index(response)
    wanted = [logits[start + end - 1].item() / 3 for end in ends]
    for max_batch_tokens in (1, 10_000):
        model = ProcessModel(ModelOptions(path=path, max_batch_tokens=max_batch_tokens))
        value, *_ = model(items(response, *RESPONSES))
        placed = value["placed"]
        assert isinstance(placed, list)
        assert [end for end, _ in placed] == list(ends)
        assert [part for _, part in placed] == pytest.approx(wanted, abs=1e-5)
        assert value["score"] == pytest.approx(sum(wanted), abs=1e-5)


async def test_a_process_models_parts_come_to_the_caller(tmp_path: Path) -> None:
    model = ProcessModel(ModelOptions(path=save_process(tmp_path)))
    async with RewardServer(model, batch=True) as server, RewardClient(server.address) as client:
        (result,) = await client.score(items("a\nb"))
    assert [end for end, _ in result.placed] == [2, 3]
    assert result.reward == pytest.approx(sum(part for _, part in result.placed))


def save_judge(folder: Path, **config: object) -> ModelOptions:
    """A language model that writes letters, with generation settings of its own that would have it sample."""
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    save(folder)
    torch.manual_seed(5)
    shape = LlamaConfig(
        vocab_size=256, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, initializer_range=0.5, eos_token_id=33,
        tie_word_embeddings=False, bos_token_id=1,
    )  # fmt: skip
    model = LlamaForCausalLM(shape)
    model.generation_config = GenerationConfig(do_sample=True, temperature=5.0, eos_token_id=33)
    model.save_pretrained(folder)
    (folder / "judge.txt").write_text("Is {response} right for {prompt}?")
    return ModelOptions(path=str(folder), prompt_file=str(folder / "judge.txt"), max_tokens=6)


def answer_of(options: ModelOptions, response: str) -> str:
    """What the model writes, a token at a time, by transformers' forward alone."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(options.path)
    tokenizer = AutoTokenizer.from_pretrained(options.path)
    text = f"<user>Is {response} right for 2 + 2??</s>"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    start = len(ids)
    while len(ids) - start < options.max_tokens and ids[-1] != 33:
        ids.append(int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
    return str(tokenizer.decode(ids[start:], skip_special_tokens=True))


def test_a_judge_from_a_folder_decodes_greedily_in_any_batch(tmp_path: Path) -> None:
    options = save_judge(tmp_path)
    responses = [*RESPONSES, "x" * 300]
    answers = [answer_of(options, response) for response in RESPONSES]
    assert len(set(answers)) > 2, answers
    texts = [answer.lower().strip() for answer in answers]
    words = {text: float(number) for number, text in enumerate(dict.fromkeys(texts[:-1]))}
    for max_batch_tokens in (1, 150, 10_000):
        judge = GenerativeModel(
            replace(options, pattern=r"(?s)\A(.*)\Z", words=words, max_batch_tokens=max_batch_tokens)
        )
        *grades, long = judge(items(*responses))
        expected = [words.get(text) for text in texts]
        assert [None if isinstance(grade, RewardError) else grade for grade in grades] == expected
        assert isinstance(long, RewardError)
        assert str(long) == "the judge's question has 331 tokens: the model reads 250 beside max_tokens=6"


async def test_an_answer_without_a_grade_costs_its_item_alone(tmp_path: Path) -> None:
    options = save_judge(tmp_path)
    graded, other = answer_of(options, "4"), answer_of(options, "it is four")
    assert graded != other
    judge = GenerativeModel(replace(options, pattern=f"({re.escape(graded)})", words={graded.strip(): 0.5}))
    async with RewardServer(judge, batch=True) as server, RewardClient(server.address) as client:
        good, bad = await client.score(items("4", "it is four"))
    assert (good.reward, bad.reward) == (0.5, None)
    assert bad.error.startswith(f"{RewardErrorKind.WRONG_TYPE.value}: the judge's answer has no grade")


def test_the_version_of_a_judge_is_also_that_of_its_prompt(tmp_path: Path) -> None:
    options = save_judge(tmp_path / "model")
    (tmp_path / "other.txt").write_text("Grade {response}.")
    changes: list[dict[str, Any]] = [
        {}, {"prompt_file": str(tmp_path / "other.txt")}, {"pattern": "(a)"}, {"words": {"a": 1.0}},
        {"max_tokens": 7}, {"dtype": "bfloat16"}, {"max_batch_tokens": 9},
    ]  # fmt: skip
    versions = [reward_models._version(replace(options, **change)) for change in changes]
    assert len(set(versions[:6])) == 6
    assert versions[6] == versions[0]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"kind": "generative"}, "is a judge .kind: generative.: set prompt_file"),
        ({"prompt_file": "p", "max_tokens": 3}, "where prompt_file, max_tokens would have no effect"),
    ],
)
def test_a_judge_has_a_prompt_and_nothing_else_has_one(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        RewardModelConfig.model_validate({"name": "rm", "path": "m"} | changes)
    judge = RewardModelConfig(name="rm", path="m", kind="generative", prompt_file="p")
    for model in (judge, RewardModelConfig(name="rm", path="m")):
        assert RewardModelConfig.model_validate(model.model_dump(mode="json")) == model


def test_the_command_line_of_a_judge_says_what_its_configuration_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = RewardModelConfig(
        name="j", path="m", kind="generative", prompt_file="p.txt", pattern="-(yes|no)", words={"yes": 1},
        max_tokens=9,
    )  # fmt: skip
    file = tmp_path / "run.yaml"
    tree = {
        "data": {"train_files": "t.jsonl"},
        "model": {"path": "m"},
        "reward": {"models": [model.model_dump(mode="json")]},
        "trainer": {"total_steps": 1},
    }
    file.write_text(yaml.safe_dump(tree))
    options: list[ModelOptions] = []

    def load(given: ModelOptions) -> None:
        options.append(given)
        raise ConfigError("enough")

    monkeypatch.setitem(reward_models._ENGINES["transformers"], "generative", load)  # type: ignore[misc]
    spec = reward_model(config(), model, 0, addresses=["h:1"], env={})
    told = spec.command[spec.command.index("paceline.reward.models") + 1 :]
    assert reward_models.main(list(told)) == 2
    assert reward_models.main(["--config", str(file), "--name", "j", "--port", "0"]) == 2
    wanted = ModelOptions(
        path="m", prompt_file="p.txt", pattern="-(yes|no)", words={"yes": 1.0}, max_tokens=9
    )
    assert options == [wanted, wanted]
    with pytest.raises(SystemExit):
        reward_models.main(["m", "--kind", "generative", "--port", "0"])
    for words in ('{"a": 1', "[1]", '{"a": "b"}'):
        with pytest.raises(SystemExit):
            reward_models.main(["m", "--kind", "generative", "--words", words, "--port", "0"])
        assert "is no JSON object of numbers" in capsys.readouterr().err


def test_a_folders_version_is_that_of_its_files(tmp_path: Path) -> None:
    weights = bytearray(5 * 2**20)
    (tmp_path / "config.json").write_text("{}")
    versions = []
    for change in (None, 0, 2**20 * 3, None, len(weights) - 1, "config.json", "added.json"):
        if isinstance(change, int):
            weights[change - change % (len(weights) // 64)] ^= 1
        elif change is not None:
            (tmp_path / change).write_text("{ }")
        (tmp_path / "model.safetensors").write_bytes(weights)
        versions.append(folder_version(tmp_path))
    assert len(set(versions)) == 6
    assert versions[2] == versions[3]


# A regular expression that takes for ever lets no other Python thread run, as a kernel that hangs may not.
HANGS = """
import re, sys, time
from paceline.reward.models.deadline import Bounded
model = Bounded(lambda items: [re.match("(a+)+$", item) for item in items], 3.0)
assert model(["aab", "aa"])[0] is None
time.sleep(3.3)
print("answered", flush=True)
model(["a" * 60 + "b"])
print("too late")
"""


def test_a_model_that_hangs_ends_its_process_and_says_where() -> None:
    done = run(["-c", HANGS], timeout=120)
    assert (done.returncode, done.stdout) == (1, "answered\n")
    assert "Timeout (0:00:03)!" in done.stderr
    assert "in __call__" in done.stderr


RUN = """
data: {train_files: t.jsonl}
model: {path: m}
reward: {models: [{name: rm, path: %s, timeout_s: 7, dtype: bfloat16, device: "cuda:3"}]}
trainer: {total_steps: 1}
"""


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--name", "other"], "has no model 'other' under reward.models, which names rm"),
        (["--name", "rm"], "None is not a local folder and is not a valid model identifier"),
        (["also/a/path"], "give either the path of a model or --config"),
    ],
)
def test_a_container_takes_its_model_from_the_runs_configuration(
    words: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(RUN % "models/judge")
    options: list[ModelOptions] = []

    def load(given: ModelOptions) -> None:
        options.append(given)
        raise ConfigError("None is not a local folder and is not a valid model identifier")

    monkeypatch.setitem(reward_models._ENGINES["transformers"], "sequence_classification", load)  # type: ignore[misc]
    arguments = ["--config", str(file), "--port", "0", *words]
    if words[0] == "also/a/path":
        with pytest.raises(SystemExit):
            reward_models.main(arguments)
    else:
        assert reward_models.main(arguments) == 2
    assert said in capsys.readouterr().err
    if words[-1] == "rm":
        wanted = ModelOptions(path="models/judge", device="cuda:0", dtype="bfloat16")
        assert options == [wanted]


def test_a_container_takes_its_engine_from_the_runs_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text((RUN % "models/judge").replace("name: rm", "name: rm, engine: vllm"))
    # As where it is not installed.
    monkeypatch.setitem(sys.modules, "vllm", None)
    assert reward_models.main(["--config", str(file), "--name", "rm", "--port", "0"]) == 2
    assert "install the packages of a rollout server, or set engine: transformers" in capsys.readouterr().err


def test_vllm_is_for_models_with_one_score() -> None:
    judge = {"name": "j", "path": "m", "kind": "generative", "prompt_file": "j.txt", "engine": "vllm"}
    with pytest.raises(ValueError, match="has kind: generative, which vLLM's pooling runner does not"):
        RewardConfig.model_validate({"models": [judge]})
    with pytest.raises(SystemExit):
        reward_models.main(["m", "--kind", "process", "--engine", "vllm", "--port", "0"])


@pytest.mark.parametrize(
    ("response", "ends"),
    [("", ()), ("a", (1,)), ("a\n", (2,)), ("\n\na\n\nb", (5, 6)), ("a\n\n\n", (4,))],
)
def test_where_steps_end(response: str, ends: tuple[int, ...]) -> None:
    assert step_ends(response, "\n") == ends


def test_configured_models_attach_under_their_names() -> None:
    config = RewardConfig.model_validate(
        {"attached": [{"name": "people"}], "models": [{"name": "rm", "path": "m", "weight": 0.5}]}
    )
    people, model = WeightedSum.configured(ScorerSettings(config=config)).attached
    assert (people.names, model.names) == (["people"], ["rm"])
    section = config.models[0].attached
    assert (section.weight, section.timeout_s, section.wait_for_s) == (0.5, 120.0, 600.0)
