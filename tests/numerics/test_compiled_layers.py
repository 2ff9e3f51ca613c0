"""Compiled layers: no compilation per micro-batch, and a ratio of 1 though the compiler rounds as it likes.

A backend of the test's stands in for the compiler: making kernels takes minutes on two cores.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.exc import TorchDynamoException

from paceline.config.run import RunConfig
from paceline.config.training.algorithm import FrozenNetworkConfig
from paceline.core.errors import NumericsError
from paceline.learner.batch.pack import pack
from paceline.learner.batch.types import PackedSequences
from paceline.learner.distributed.engine_memory import GpuMemory
from paceline.learner.distributed.ranks import Ranks
from paceline.learner.model.architectures import UncompilableError
from paceline.learner.model.decoder import compiling
from paceline.learner.model.decoder.experts import routers
from paceline.learner.model.loading import forget_forward_passes
from paceline.learner.model.networks import PolicyNetwork, body_of, decoder_layers
from paceline.learner.train import scoring
from paceline.learner.train.state.learner import Learner
from paceline.learner.train.warm_up import load_warm, warm_up
from support.architectures import tiny_config
from support.learner_fakes import VOCAB_SIZE, run_config, write_model
from support.learner_scenarios import numbers, take_step, train

pytestmark = [
    pytest.mark.torch,
    pytest.mark.usefixtures("ranks"),
    pytest.mark.timeout(900),
    # torch's own, while it traces.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]
NUM_LAYERS = 2

GROUPS = {"adv_estimator": "grpo", "use_kl_in_reward": False, "kl_ctrl": {"type": "fixed", "kl_coef": 0.1}}


class Compiler:
    """Counts compilations; graphs without gradients round differently.

    As compilers for GPUs do, it asks what the number of tokens is a multiple of, and so binds the graph to
    the answers.
    """

    def __init__(self) -> None:
        self.num_graphs = 0
        self.unknown_sizes: set[int] = set()
        self.rounding = 1.001

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        self.num_graphs += 1
        sizes = {str(size) for size in inputs if isinstance(size, torch.SymInt)}
        self.unknown_sizes.add(len({size for size in sizes if not size.isdecimal()}))
        for size in inputs:
            if isinstance(size, torch.SymInt):
                assert [bool(size % divisor == 0) for divisor in (8, 16, 64)]
        if torch.is_grad_enabled():
            return graph.forward

        def rounded(*arguments: Any) -> Any:
            outputs = graph.forward(*arguments)
            return [x * self.rounding if torch.is_tensor(x) and x.is_floating_point() else x for x in outputs]

        return rounded


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[Compiler]:
    backend = Compiler()
    monkeypatch.setattr(compiling, "BACKEND", backend)
    yield backend
    torch._dynamo.reset()


def build(model: Path, ranks: Ranks, **actor: Any) -> Learner:
    settings = {"ppo_max_token_len_per_gpu": 96, "ratio_audit_freq": 1, **actor}
    return Learner.build(run_config(model, algorithm=GROUPS, actor=settings), ranks)


def record_tokens(learner: Learner) -> set[int]:
    """How many tokens go through the first layer from now on."""
    numbers_of_tokens: set[int] = set()
    layer = decoder_layers(body_of(learner.actor.network.lm))[0]
    layer.register_forward_pre_hook(lambda _, given: numbers_of_tokens.add(given[0].shape[1]))
    return numbers_of_tokens


def run_unpadded(network: PolicyNetwork) -> None:
    """A pass of as many tokens as there are."""
    network.token_multiple = 1
    with torch.no_grad():
        network(pack([], torch.device("cpu")))
    forget_forward_passes(network)
    network.token_multiple = compiling.TOKEN_MULTIPLE


def assert_unchanged(network: PolicyNetwork, before: list[torch.Tensor]) -> None:
    """Its parameters have these values, and no gradients."""
    for parameter, value in zip(network.parameters(), before, strict=True):
        assert torch.equal(parameter.full_tensor(), value.full_tensor())  # type: ignore[attr-defined]
        assert parameter.grad is None


def test_a_warm_up_leaves_nothing_to_compile_and_numbers_are_those_of_eager_layers(
    model: Path,
    ranks: Ranks,
    compiler: Compiler,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """With critic, reference and a frozen network of another shape."""
    teacher = FrozenNetworkConfig(path=str(write_model(tmp_path, hidden_size=32, num_layers=3)))

    def learner(**more: Any) -> Learner:
        actor = {"ppo_max_token_len_per_gpu": 96, "ratio_audit_freq": 1, "shared_prompts": "on", **more}
        config = run_config(model, actor=actor, critic={"warmup": 0})
        algorithm = config.algorithm.model_copy(update={"networks": {"teacher": teacher}})
        return Learner.build(config.model_copy(update={"algorithm": algorithm}), ranks)

    caplog.set_level("INFO", "paceline.learner.train")
    eager, warm = learner(), learner(compile=True)
    before = [parameter.clone() for parameter in warm.actor.network.parameters()]
    random_state = torch.get_rng_state()
    warm_up(warm)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert_unchanged(warm.actor.network, before)
    num_graphs = compiler.num_graphs
    assert 0 < num_graphs <= 12
    assert f"before the first step, {num_graphs} compilations" in caplog.text
    assert compiler.unknown_sizes == {1}  # the number of tokens; a kernel with others divides for each number

    numbers_of_tokens = record_tokens(warm)
    results = [take_step(warm, step) for step in (1, 2)]
    assert len(numbers_of_tokens) > 1  # micro-batches differ, and are all padded
    assert all(number % compiling.TOKEN_MULTIPLE == 0 for number in numbers_of_tokens)
    assert compiler.num_graphs == num_graphs
    assert [result.metrics["perf/compile_s"] for result in results] == [0.0, 0.0]
    assert [result.metrics["perf/compilations"] for result in results] == [0.0, 0.0]
    metrics = [numbers(result) for result in results]
    assert [own["actor/first_ppo_kl"] for own in metrics] == [0.0, 0.0]
    # Graphs are those of layers with these shapes, whichever learner has them.
    not_warmed_up = learner(compile=True)
    assert [numbers(take_step(not_warmed_up, step)) for step in (1, 2)] == metrics
    compiler.rounding = 1.0
    for own, expected in zip(train(learner(compile=True), 1, 2), train(eager, 1, 2), strict=True):
        assert own == pytest.approx(expected, rel=1e-3, abs=1e-5)
    compiler.rounding = 1.001

    # Old log-probs without a graph would part from the update.
    honest = scoring._score_all
    monkeypatch.setattr(scoring, "_score_all", lambda *given, with_graph: honest(*given, with_graph=False))
    with pytest.raises(NumericsError, match="must be exactly on policy"):
        take_step(warm, 3)


@pytest.mark.more
def test_without_padding_there_is_more_to_compile_and_the_log_says_so(
    model: Path, ranks: Ranks, compiler: Compiler, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "paceline.learner.train")
    learner = build(model, ranks, compile=True, use_kl_loss=True)
    warm_up(learner)
    num_graphs = compiler.num_graphs
    run_unpadded(learner.frozen["reference"].network)
    caplog.clear()
    result = take_step(learner, 1)
    assert result.metrics["perf/compile_s"] > 0
    assert result.metrics["perf/compilations"] == compiler.num_graphs - num_graphs > 0
    assert re.search(r"step 1: [1-9].* compilations of layers took .*%", caplog.text), caplog.text


def test_layers_with_experts_share_graphs_and_updates_know_what_was_chosen(
    ranks: Ranks, compiler: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With choices and without, layers are compiled before the first step.

    Old log-probs come from the graphs of the update, which note choices: on a GPU others round differently.
    """
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    config = tiny_config("qwen3_moe", vocab_size=VOCAB_SIZE, num_hidden_layers=3)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    eager, compiled = (build(tmp_path, ranks, compile=compile_them) for compile_them in (False, True))
    warm_up(compiled)
    num_graphs = compiler.num_graphs
    assert 0 < num_graphs <= 6  # as of a single layer
    for step in (1, 2):
        expected, own = (numbers(take_step(learner, step)) for learner in (eager, compiled))
        assert own == pytest.approx(expected, rel=1e-3, abs=1e-5)
        assert own["actor/grad_norm"] > 0
        assert own["actor/load_balance"] >= 1.0
        assert compiler.num_graphs == num_graphs
        assert own["actor/first_ppo_kl"] == 0.0

    honest, notes = PolicyNetwork.forward, []

    def forward(network: PolicyNetwork, *given: Any) -> Any:
        notes.append([router.notes_choice for router in routers(network.lm)])
        return honest(network, *given)

    monkeypatch.setattr(PolicyNetwork, "forward", forward)
    take_step(compiled, 3)
    assert len(notes) > 1
    assert notes == [[True] * 3] * len(notes)


def test_replayed_choices_of_experts_compile_nothing_in_a_step(
    ranks: Ranks, compiler: Compiler, tmp_path: Path
) -> None:
    """Batches of several lengths, also one without choices; the policy, and a reference without gradients."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    config = tiny_config("qwen3_moe", vocab_size=VOCAB_SIZE, num_hidden_layers=3)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    compiler.rounding = 1.0
    eager, compiled = (
        build(tmp_path, ranks, compile=compile_them, router_replay=True, use_kl_loss=True)
        for compile_them in (False, True)
    )
    warm_up(compiled)
    num_graphs = compiler.num_graphs
    assert 0 < num_graphs <= 9
    numbers_of_tokens = record_tokens(compiled)
    for step, choices in ((1, (3, 4, 2)), (2, None), (3, (3, 4, 2))):
        expected, own = (numbers(take_step(learner, step, choices=choices)) for learner in (eager, compiled))
        assert own == pytest.approx(expected, rel=1e-3, abs=1e-5)
        assert own["actor/first_ppo_kl"] == 0.0
        assert own["actor/router_replay_missing"] == (choices is None)
        assert (own["actor/router_replay_changed"] > 0.3) == (choices is not None)
        assert compiler.num_graphs == num_graphs
    assert len(numbers_of_tokens) > 1


@pytest.mark.more
def test_adapters_are_compiled_with_their_layers_and_left_out_for_the_reference(
    model: Path, ranks: Ranks, compiler: Compiler
) -> None:
    def learner(*, compile_them: bool) -> Learner:
        actor = {"ppo_max_token_len_per_gpu": 96, "ratio_audit_freq": 1, "use_kl_loss": True}
        lora = {"lora": {"rank": 4, "alpha": 8.0}}
        config = run_config(model, algorithm=GROUPS, model=lora, actor={**actor, "compile": compile_them})
        return Learner.build(config, ranks)

    compiler.rounding = 1.0  # the reference has no gradients, and the policy's log-probs come with a graph
    eager, compiled = learner(compile_them=False), learner(compile_them=True)
    warm_up(compiled)
    num_graphs = compiler.num_graphs
    assert 0 < num_graphs <= 12
    for step in (1, 2):
        expected, own = (numbers(take_step(each, step)) for each in (eager, compiled))
        assert own == pytest.approx(expected, rel=1e-3, abs=1e-6)
    assert own["algorithm/reference_kl"] != 0.0
    assert compiler.num_graphs == num_graphs


def test_no_graph_is_bound_to_where_sequences_begin() -> None:
    """With torch 2.11 the tests of this file show it by their numbers of graphs."""
    assert not is_dataclass(PackedSequences)


def test_graphs_for_gpus_do_not_probe_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import config

    for device, users, expected in (("cuda", None, False), ("cuda", True, True), ("cpu", None, None)):
        monkeypatch.setattr(config.cpp, "vec_isa_ok", users)
        compiling.compile_layers(torch.nn.ModuleList(), 1.0, torch.device(device))
        assert config.cpp.vec_isa_ok is expected


def test_layers_are_compiled_before_there_are_averages_and_what_that_took_is_given_back(
    model: Path, ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that starts on the same GPU has found no memory beside averages and a compiler's passes."""
    order: list[str] = []
    warmed: list[Learner] = []

    def warm(learner: Learner) -> None:
        assert not learner.actor.optimizer.state()
        assert learner.critic is not None
        assert not learner.critic.optimizer.state()
        warmed.append(learner)
        order.append("compile")

    def give_back(memory: GpuMemory) -> int:
        order.append("averages" if warmed[0].actor.optimizer.state() else "give back")
        return 0

    monkeypatch.setattr("paceline.learner.train.warm_up.warm_up", warm)
    monkeypatch.setattr(GpuMemory, "give_back", give_back)
    learner = load_warm(run_config(model, critic={"warmup": 0}), ranks, print)
    assert learner is warmed[0]
    assert order == ["compile", "give back"]
    assert learner.actor.optimizer.state().keys() == build(model, ranks).actor.optimizer.state().keys()
    assert learner.critic is not None
    assert learner.critic.optimizer.state()


@pytest.mark.parametrize("given", ["auto", True])
@pytest.mark.parametrize("error", [TorchDynamoException, UncompilableError])
def test_a_compiler_that_fails_is_left_out_unless_it_was_asked_for(
    given: str | bool,
    error: type[Exception],
    model: Path,
    ranks: Ranks,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with_compile = RunConfig.with_compile

    def fail(learner: Learner) -> None:
        if learner.config.actor.compile:
            raise error("no C compiler\nfurther lines")

    monkeypatch.setattr("paceline.learner.train.warm_up.warm_up", fail)
    monkeypatch.setattr(compiling, "BACKEND", Compiler())
    monkeypatch.setattr(RunConfig, "with_compile", lambda config, **_: with_compile(config, on_gpu=True))
    said: list[str] = []
    config = run_config(model, actor={"compile": given})
    if given is True:
        with pytest.raises(error):
            load_warm(config, ranks, said.append)
        assert not said
        return
    learner = load_warm(config, ranks, said.append)
    (words,) = said
    assert words.startswith("layers cannot be compiled here (no C compiler); ")
    assert learner.compile_clock is None
    assert learner.config.actor.compile is False
    assert learner.actor.optimizer.state()


def test_what_is_compiled_by_itself() -> None:
    """Layers on a GPU, whatever ranks exchange; what the file says stays."""

    def chosen(*, on_gpu: bool = True, **changes: Any) -> object:
        config = run_config(Path("model"), **changes)
        return config.with_compile(on_gpu=on_gpu).actor.compile

    assert chosen() is True
    assert chosen(on_gpu=False) is False
    assert chosen(model={"lora": {"rank": 2}}) is True
    for exchange in ("context_parallel", "expert_parallel", "tensor_parallel"):
        assert chosen(learner={"world_size": 2, exchange: 2}) is True
    assert chosen(actor={"compile": False}) is False
    assert chosen(actor={"compile": True}, on_gpu=False) is True


def test_layers_that_are_not_compiled_are_not_warmed_up(model: Path, ranks: Ranks) -> None:
    learner = build(model, ranks)
    numbers_of_tokens = record_tokens(learner)
    warm_up(learner)
    assert not numbers_of_tokens


def test_a_warm_up_takes_whole_micro_batches_through_two_layers(
    ranks: Ranks, compiler: Compiler, tmp_path: Path
) -> None:
    learner = build(write_model(tmp_path, num_layers=4), ranks, compile=True, ppo_max_token_len_per_gpu=300)
    layers = decoder_layers(body_of(learner.actor.network.lm))
    calls: list[tuple[int, int]] = []
    for number, layer in enumerate(layers):
        layer.register_forward_pre_hook(
            lambda _, given, number=number: calls.append((number, given[0].shape[1]))
        )
    with torch.compiler.set_stance("force_eager"):  # the graphs are none of this test's business
        warm_up(learner)
        assert calls == [(0, 256), (1, 256)]
        layers[2].self_attn.sliding_window = 7
        calls.clear()
        warm_up(learner)
        assert [number for number, _ in calls] == [0, 1, 2]
        calls.clear()
        take_step(learner, 1)
    assert compiler.num_graphs == 0
    assert {number for number, _ in calls} == {0, 1, 2, 3}


def test_a_learners_kernels_outlive_its_run_and_its_memory_grows_in_place(tmp_path: Path) -> None:
    """Left alone, compilers take a folder below TMPDIR, which a run's end removes, or none."""
    own = {"PACELINE_CACHE_DIR": str(tmp_path / "cache"), "TMPDIR": str(tmp_path)}
    environ = {name: value for name, value in os.environ.items() if name != "TORCHINDUCTOR_CACHE_DIR"} | own
    settings = "FLASH_ATTENTION_", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"
    environ = {name: value for name, value in environ.items() if not name.startswith(settings)}
    code = (
        "import importlib, os, paceline.learner.__main__ as m, torch._inductor.runtime.cache_dir_utils as c\n"
        "print(c.cache_dir())\n"
        "print(*(os.environ[f'FLASH_ATTENTION_CUTE_DSL_CACHE_{name}'] for name in ('DIR', 'ENABLED')))\n"
        "print(os.environ.pop('PYTORCH_CUDA_ALLOC_CONF'))\n"
        "os.environ['PYTORCH_ALLOC_CONF'] = 'a user has chosen'\n"
        "importlib.reload(m)\n"
        "print(os.environ.get('PYTORCH_CUDA_ALLOC_CONF'))"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True, timeout=300
    )
    kernels = tmp_path / "cache" / "kernels"
    assert ended.stdout.splitlines() == [
        str(kernels),
        f"{kernels / 'attention'} 1",
        "expandable_segments:True",
        "None",
    ]
