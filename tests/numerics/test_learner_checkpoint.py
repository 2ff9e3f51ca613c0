"""Checkpoints of a real learner: written in the background, verified, and the newest intact one is loaded."""

from __future__ import annotations

import gc
import math
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from paceline.config.run import RunConfig
from paceline.core.errors import CheckpointError
from paceline.core.run_record.manifest import MANIFEST
from paceline.learner.checkpoint import write
from paceline.learner.checkpoint.load import load, load_newest, roll_back
from paceline.learner.checkpoint.manifest import Manifest
from paceline.learner.checkpoint.state import state_of
from paceline.learner.checkpoint.write import CheckpointWriter
from paceline.learner.distributed.collectives import CommandError
from paceline.learner.distributed.host_memory import host_memory
from paceline.learner.distributed.ranks import Ranks
from paceline.learner.export import read_policy
from paceline.learner.model.loading import as_fsdp
from paceline.learner.train.state import host_averages
from paceline.learner.train.state.learner import Learner
from paceline.storage.folder import Folder
from support.learner_fakes import run_config
from support.learner_scenarios import numbers, save
from support.learner_scenarios import take_step as step_of_prompts
from support.s3_server import S3Server, s3_server

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("ranks")]


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Server]:
    with s3_server() as server:
        yield server


# One mini-batch a step.
take_step = partial(step_of_prompts, num_prompts=4)


def train(learner: Learner, first: int, last: int) -> list[dict[str, float]]:
    """The numbers of steps first..last."""
    return [numbers(take_step(learner, step)) for step in range(first, last + 1)]


WITHOUT_CRITIC = {"use_kl_in_reward": False, "kl_ctrl": {"type": "fixed", "kl_coef": 0.1}}


def tensors(learner: Learner) -> dict[str, torch.Tensor]:
    """Copies of all that is saved but for the random state, which tests share."""
    return {
        f"{part}.{name}": (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()
        for part, entries in state_of(learner).items()
        if part != "rng"
        for name, tensor in entries.items()
    }


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def flip(path: Path, position: float = 0.5) -> None:
    """Flips one bit."""
    data = bytearray(path.read_bytes())
    data[int(position * (len(data) - 1))] ^= 1
    path.write_bytes(bytes(data))


def flip_in(path: Path, word: bytes) -> None:
    """Flips one bit of a word. Of a number's last digit it need not change what the text says."""
    data = path.read_bytes()
    flip(path, (data.index(word) + 0.5) / (len(data) - 1))


def tear(path: Path) -> None:
    """Cuts off the second half."""
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


Saved = list[tuple[Path, dict[str, torch.Tensor]]]


@pytest.fixture(scope="module")
def saved(model: Path, ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """The checkpoints of steps 2 and 1, and what the learner had then."""
    learner, root = Learner.build(run_config(model), ranks), tmp_path_factory.mktemp("checkpoints")
    saved = []
    for step in (1, 2):
        take_step(learner, step)
        save(learner, root / f"step_{step:06d}", step=step)
        saved.insert(0, (root / f"step_{step:06d}", tensors(learner)))
    return saved


@pytest.fixture(scope="module")
def folders(saved: Saved) -> list[Path]:
    """The checkpoints of steps 2 and 1."""
    return [folder for folder, _ in saved]


DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "a bit of the shards": (
        lambda folder: flip(folder / "__0_0.distcp"),
        "__0_0.distcp has changed: its digest",
    ),
    "a bit at the shards' end": (lambda folder: flip(folder / "__0_0.distcp", 1.0), "has changed"),
    "a bit of the metadata": (lambda folder: flip(folder / ".metadata"), "metadata has changed"),
    "a bit of the manifest": (lambda folder: flip_in(folder / MANIFEST, b"world_size"), "manifest.json"),
    "a number in the manifest": (
        lambda folder: (folder / MANIFEST).write_text(
            (folder / MANIFEST).read_text().replace('"version": 2', '"version": 3')
        ),
        "was changed after it was written",
    ),
    "torn shards": (lambda folder: tear(folder / "__0_0.distcp"), r"has \d+ bytes, \d+ were written"),
    "torn metadata": (lambda folder: tear(folder / ".metadata"), r"has \d+ bytes, \d+ were written"),
    "a torn manifest": (lambda folder: tear(folder / MANIFEST), "is not JSON"),
    "an empty manifest": (lambda folder: (folder / MANIFEST).write_text(""), "is not JSON"),
    "no shards": (lambda folder: (folder / "__0_0.distcp").unlink(), "cannot be read: No such file"),
    "no metadata": (lambda folder: (folder / ".metadata").unlink(), "cannot be read: No such file"),
    "no manifest": (lambda folder: (folder / MANIFEST).unlink(), "is no complete checkpoint"),
    "no folder": (shutil.rmtree, "is no complete checkpoint"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_the_checkpoint_before_a_damaged_one_is_taken(
    model: Path, ranks: Ranks, saved: Saved, tmp_path: Path, damage: str
) -> None:
    newest, older = (Path(shutil.copytree(folder, tmp_path / folder.name)) for folder, _ in saved)
    break_it, sentence = DAMAGES[damage]
    break_it(newest)
    learner, notices = Learner.build(run_config(model), ranks), list[str]()
    before = tensors(learner)
    with pytest.raises(CommandError, match=sentence):
        load(learner, newest)
    with pytest.raises(CommandError, match=sentence):
        roll_back(learner, newest)
    assert same(tensors(learner), before)
    assert learner.version == 0
    assert load_newest(learner, [newest, older], notify=notices.append) == older
    assert learner.version == 1
    (notice,) = notices
    assert notice.startswith(f"the checkpoint {newest} is damaged and passed over: ")
    assert same(tensors(learner), saved[1][1])


def test_without_an_intact_checkpoint_there_is_an_error_and_without_any_the_model_itself(
    model: Path, ranks: Ranks, folders: list[Path], tmp_path: Path
) -> None:
    newest, older = (Path(shutil.copytree(folder, tmp_path / folder.name)) for folder in folders)
    flip(newest / "__0_0.distcp")
    tear(older / MANIFEST)
    learner = Learner.build(run_config(model), ranks)
    before = tensors(learner)
    with pytest.raises(
        CheckpointError, match=r"none of the 2 checkpoints is intact: .*has changed.*not JSON"
    ):
        load_newest(learner, [newest, older])
    assert load_newest(learner, []) is None
    assert same(tensors(learner), before)
    assert learner.version == 0


def test_a_checkpoint_of_other_networks_is_refused_however_many_there_are(
    model: Path, ranks: Ranks, folders: list[Path]
) -> None:
    other = Learner.build(run_config(model, algorithm={"adv_estimator": "grpo", **WITHOUT_CRITIC}), ranks)
    with pytest.raises(CheckpointError, match="holds a critic, algorithm.adv_estimator=grpo needs no critic"):
        load_newest(other, folders)


def with_kl(model: Path, kind: str, coef: float) -> RunConfig:
    control = {"type": kind, "kl_coef": coef, "target_kl": 0.1, "horizon": 1000}
    return run_config(model, algorithm={"adv_estimator": "gae", "use_kl_in_reward": True, "kl_ctrl": control})


def test_a_fixed_kl_coefficient_is_configuration_and_an_adaptive_one_is_state(
    model: Path, ranks: Ranks, tmp_path: Path
) -> None:
    reached: dict[str, float] = {}
    for kind in ("fixed", "adaptive"):
        learner = Learner.build(with_kl(model, kind, 0.05), ranks)
        take_step(learner, 1)
        save(learner, tmp_path / kind, step=1)
        reached[kind] = learner.kl_controller.value
    assert reached["fixed"] == 0.05 != reached["adaptive"]
    expected = {
        ("fixed", "fixed"): 0.2,
        ("adaptive", "adaptive"): reached["adaptive"],
        ("fixed", "adaptive"): 0.2,
        ("adaptive", "fixed"): 0.2,
    }
    for (before, now), value in expected.items():
        resumed = Learner.build(with_kl(model, now, 0.2), ranks)
        load(resumed, tmp_path / before)
        assert resumed.kl_controller.value == value, (before, now)


def with_rates(model: Path, total_steps: int, **optim: Any) -> RunConfig:
    falling = {"lr": 1e-3, "lr_scheduler": "cosine", "warmup_steps_ratio": 0.5, "min_lr_ratio": 0.1, **optim}
    actor = {"ppo_mini_batch_size": 4, "ppo_max_token_len_per_gpu": 128, "optim": falling}
    return run_config(
        model, actor=actor, critic={"optim": falling}, trainer={"total_steps": total_steps, "seed": 3}
    )


def test_a_longer_run_goes_on_at_the_rate_that_it_has_reached(
    model: Path, ranks: Ranks, tmp_path: Path
) -> None:
    first = Learner.build(with_rates(model, 4), ranks)
    before = [metrics["actor/lr"] for metrics in train(first, 1, 3)]
    assert before == pytest.approx([5e-4, 1e-3, 5.5e-4])
    save(first, tmp_path / "step_000003", step=3)
    notices = list[str]()
    same = Learner.build(with_rates(model, 4), ranks)
    load_newest(same, [tmp_path / "step_000003"], notify=notices.append)
    assert not notices
    assert take_step(same, 4).metrics["actor/lr"] == pytest.approx(1e-4)
    longer = Learner.build(with_rates(model, 9), ranks)
    load_newest(longer, [tmp_path / "step_000003"], notify=notices.append)
    told = "goes on from 0.00055 in step 3 to 0.000434 in step 4; it would have been 0.0001"
    assert notices == [
        f"trainer.total_steps 4 -> 9: the learning rate of the {network} {told}"
        for network in ("policy", "critic")
    ]
    metrics = train(longer, 4, 5)
    assert [entry["actor/lr"] for entry in metrics] == [entry["critic/lr"] for entry in metrics]
    # The half of the fall that is left is spread over the six steps that are left.
    assert [entry["actor/lr"] for entry in metrics] == pytest.approx(
        [1e-4 + 9e-4 * 0.5 * (1 + math.cos(math.pi * (0.5 + 0.5 * done / 6))) for done in (1, 2)]
    )
    save(longer, tmp_path / "step_000005", step=5)
    again, notices = Learner.build(with_rates(model, 9), ranks), []
    load_newest(again, [tmp_path / "step_000005"], notify=notices.append)
    assert not notices
    assert train(again, 6, 6) == train(longer, 6, 6)


def test_a_changed_rate_takes_effect_and_both_are_told(model: Path, ranks: Ranks, tmp_path: Path) -> None:
    learner = Learner.build(with_rates(model, 4), ranks)
    train(learner, 1, 2)
    save(learner, tmp_path / "step_000002", step=2)
    other = with_rates(model, 4, lr=2e-3, warmup_steps_ratio=0.9, lr_scheduler="constant")
    resumed, notices = Learner.build(other, ranks), list[str]()
    load_newest(resumed, [tmp_path / "step_000002"], notify=notices.append)
    assert notices[0] == (
        "the learning rate of the policy goes on from 0.001 in step 2 to 0.002 in step 3; it would have been "
        "0.00055"
    )
    assert take_step(resumed, 3).metrics["actor/lr"] == 2e-3  # the warm-up is over, however long it would be


class SlowDisk:
    """Holds the writing thread until it is released."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.entered, self.release, honest = threading.Event(), threading.Event(), write.save_shards

        def slow(*arguments: Any, **keywords: Any) -> Any:
            self.entered.set()
            assert self.release.wait(60)
            return honest(*arguments, **keywords)

        monkeypatch.setattr(write, "save_shards", slow)


def test_training_goes_on_while_a_checkpoint_is_written_and_does_not_change_it(
    model: Path, ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = Learner.build(run_config(model), ranks)
    take_step(learner, 1)
    saved, disk, writer = tensors(learner), SlowDisk(monkeypatch), CheckpointWriter(learner)
    written = writer.save(tmp_path / "c", step=1, controller_state=b"{}")
    assert disk.entered.wait(120)
    uninterrupted = train(learner, 2, 3)
    assert not same(tensors(learner), saved)
    assert not written.done()
    assert not (tmp_path / "c" / MANIFEST).exists()  # not complete: nobody resumes from it
    disk.release.set()
    assert written.result(timeout=120) > 0
    resumed = Learner.build(run_config(model), ranks)
    load(resumed, tmp_path / "c")
    assert same(tensors(resumed), saved)
    assert train(resumed, 2, 3) == uninterrupted


def test_the_next_checkpoint_waits_for_the_one_before(
    model: Path, ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = Learner.build(run_config(model), ranks)
    disk, writer, later = SlowDisk(monkeypatch), CheckpointWriter(learner), Future[float]()
    first = writer.save(tmp_path / "0", step=0, controller_state=b"{}")
    train(learner, 1, 1)

    def save_next() -> None:
        later.set_result(writer.save(tmp_path / "1", step=1, controller_state=b"{}").result(120))

    thread = threading.Thread(target=save_next)
    thread.start()
    assert disk.entered.wait(120)
    assert not later.done()
    disk.release.set()
    thread.join(timeout=120)
    assert first.done()
    assert later.result() > 0
    assert [Manifest.read(tmp_path / name).step for name in "01"] == [0, 1]
    first_again = Learner.build(run_config(model), ranks)
    load(first_again, tmp_path / "0")
    assert same(tensors(first_again), tensors(Learner.build(run_config(model), ranks)))


def test_a_checkpoint_that_cannot_be_written_does_not_count_and_the_next_one_does(
    model: Path, ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = Learner.build(run_config(model), ranks)
    writer, honest = CheckpointWriter(learner), write.save_shards

    def full(*arguments: Any, **keywords: Any) -> Any:
        honest(*arguments, **keywords)
        raise OSError(28, "No space\n left on a device")

    for free, reason in (
        (1 << 30, r"\[Errno 28\] No space left on a device; is the disk full or read-only\?"),
        (4096, r"the disk of .*/0 is full \(4096 bytes are free\): make room there, and the same command .*"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(write, "save_shards", full)
            patch.setattr(shutil, "disk_usage", lambda folder, free=free: SimpleNamespace(free=free))
            failed = writer.save(tmp_path / "0", step=0, controller_state=b"{}")
            with pytest.raises(CheckpointError, match=rf"^writing .*0 failed: {reason}$"):
                failed.result(timeout=120)
    with pytest.raises(CheckpointError, match="is no complete checkpoint"):
        Manifest.read(tmp_path / "0")
    assert take_step(learner, 1).step == 1
    writer.save(tmp_path / "1", step=1, controller_state=b"{}").result(timeout=120)
    load(Learner.build(run_config(model), ranks), tmp_path / "1")


def test_a_checkpoint_of_another_step_is_refused_and_one_saved_again_stays(
    model: Path, ranks: Ranks, tmp_path: Path
) -> None:
    learner = Learner.build(run_config(model), ranks)
    writer, folder = CheckpointWriter(learner), tmp_path / "c"
    with pytest.raises(CommandError, match="a checkpoint of step 3 was asked for, the learner is at 0"):
        writer.save(folder, step=3, controller_state=b"{}")
    folder.mkdir()
    (folder / "left over").write_text("of an attempt that was broken off")
    first = writer.save(folder, step=0, controller_state=b'{"a": 1}')
    first.result(timeout=120)
    assert not (folder / "left over").exists()
    assert Manifest.read(folder).controller_state == {"a": 1}
    # Saved again by the same learner it is the same checkpoint.
    assert writer.save(folder, step=0, controller_state=b'{"a": 2}') is first
    assert Manifest.read(folder).controller_state == {"a": 1}
    # Another learner's checkpoint of the step, say of a run that went back, has other weights.
    save(learner, folder, step=0, controller_state=b'{"a": 3}')
    assert Manifest.read(folder).controller_state == {"a": 3}


# --- in an object store, which has no folders and no renaming


def test_a_checkpoint_in_an_object_store_has_the_guarantees_of_one_on_disk(
    model: Path, ranks: Ranks, s3: S3Server, saved: Saved
) -> None:
    learner, root = Learner.build(run_config(model), ranks), Folder.at("s3://bucket/r-1")
    places = []
    for step in (1, 2):
        take_step(learner, step)
        place = root.child(f"step_{step:06d}")
        save(learner, place.address, step=step)
        places.insert(0, place)
    newest, older = places
    # The manifest is written last, and with the digests of the files on disk.
    puts = [path for method, path in s3.calls if method == "PUT" and "step_000002" in path]
    assert puts[-1] == "bucket/r-1/step_000002/manifest.json"
    on_disk, state = saved[0]
    assert Manifest.read(newest.address).files.keys() == Manifest.read(on_disk).files.keys()
    loaded = Learner.build(run_config(model), ranks)
    load(loaded, newest.address)
    assert same(tensors(loaded), state)
    assert loaded.version == 2
    assert dict(read_policy(newest)).keys() == dict(read_policy(Folder.at(on_disk))).keys()

    shards = "bucket/r-1/step_000002/__0_0.distcp"
    s3.objects[shards] = s3.objects[shards][:-1] + b"\xff"
    other, notices = Learner.build(run_config(model), ranks), list[str]()
    addresses = [place.address for place in places]
    assert load_newest(other, addresses, notify=notices.append) == older.address
    assert other.version == 1
    assert "__0_0.distcp has changed" in notices[0]
    del s3.objects["bucket/r-1/step_000002/manifest.json"]
    with pytest.raises(CommandError, match="is no complete checkpoint"):
        load(other, newest.address)


def test_a_store_that_refuses_the_shards_costs_the_checkpoint_and_not_the_learner(
    model: Path, ranks: Ranks, s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = Learner.build(run_config(model), ranks)
    writer, place = CheckpointWriter(learner), "s3://bucket/r-2/step_000000"
    with monkeypatch.context() as patch:
        patch.setattr(s3, "refuse", ".distcp")
        failed = writer.save(place, step=0, controller_state=b"{}")
        with pytest.raises(CheckpointError, match=r"writing s3://bucket/r-2/step_000000 failed"):
            failed.result(timeout=120)
    assert take_step(learner, 1).step == 1
    with pytest.raises(CheckpointError, match="is no complete checkpoint"):
        Manifest.read(place)


def test_pinned_memory_is_given_back_before_it_is_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, int]] = []

    class Runtime:
        @staticmethod
        def cudaHostRegister(address: int, num_bytes: int, flags: int) -> int:
            calls.append(("register", address))
            return 0

        @staticmethod
        def cudaHostUnregister(address: int) -> int:
            calls.append(("unregister", address))
            return 0

    monkeypatch.setattr(torch.cuda, "cudart", Runtime)
    # A view in another type is what is kept of it.
    part = host_memory(1024, pinned=True).view(torch.float32)[16:].view(8, -1)
    address = part.untyped_storage().data_ptr()
    gc.collect()
    assert calls == [("register", address)]
    del part
    assert calls == [("register", address), ("unregister", address)]


@pytest.mark.parametrize("optimizer", ["adamw", "adamw_8bit", "muon"])
def test_averages_in_host_memory_are_those_beside_the_parameters(
    optimizer: str, model: Path, ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_averages, "PART_BYTES", 5000)
    beside = run_config(model, actor={"optim": {"type": optimizer}})
    on_host = run_config(model, actor={"optim": {"type": optimizer}, "memory": {"offload": True}})
    plain, offloaded = Learner.build(beside, ranks), Learner.build(on_host, ranks)
    for step in (1, 2):
        take_step(plain, step)
        take_step(offloaded, step)
    assert same(tensors(plain), tensors(offloaded))
    save(offloaded, tmp_path / "step_000002", step=2)
    take_step(plain, 3)
    for config in (beside, on_host):
        resumed = Learner.build(config, ranks)
        load(resumed, tmp_path / "step_000002")
        take_step(resumed, 3)
        assert same(tensors(plain), tensors(resumed))
    other = {"adamw": "muon", "muon": "adamw_8bit", "adamw_8bit": "adamw"}[optimizer]
    changed = Learner.build(run_config(model, actor={"optim": {"type": other}}), ranks)
    with pytest.raises(CheckpointError, match="(?s)with the optimizer that is configured: .*actor_optimizer"):
        load(changed, tmp_path / "step_000002")


def test_the_averages_of_policy_and_critic_lie_in_host_memory(model: Path, ranks: Ranks) -> None:
    """On a CPU the host's are told from others by their mesh and by the one piece that each network's are."""
    learner = Learner.build(run_config(model, actor={"memory": {"offload": True}}), ranks)
    assert learner.critic is not None
    for trainable in (learner.actor, learner.critic):
        averages = [t for name, t in trainable.optimizer.state().items() if "exp_avg" in name]
        storages = {t.to_local().untyped_storage().data_ptr() for t in averages if isinstance(t, DTensor)}
        assert (len(averages) > 4, len(storages)) == (True, 1)


def test_a_rollback_reaches_parameters_that_are_gathered(model: Path, ranks: Ranks, tmp_path: Path) -> None:
    """What a pass has gathered hides the shards into which a checkpoint is read."""
    learner = Learner.build(run_config(model), ranks)
    assert learner.critic is not None
    save(learner, tmp_path / "step_000000", step=0)
    take_step(learner, 1)
    networks = (learner.actor.network, learner.critic.network)
    fresh = Learner.build(run_config(model), ranks)
    load(fresh, tmp_path / "step_000000")
    for network in networks:
        as_fsdp(network).unshard()
    roll_back(learner, tmp_path / "step_000000")
    assert same(tensors(learner), tensors(fresh))
    fresh.version = learner.version
    assert numbers(take_step(learner, 2)) == numbers(take_step(fresh, 2))


def test_all_averages_lie_in_one_piece_of_host_memory_and_parts_are_bounded(
    model: Path, ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_averages, "PART_BYTES", 5000)
    sizes: list[int] = []
    float32_step = host_averages.float32_step

    def counting(parameters: Any, *args: Any) -> None:
        sizes.append(sum(parameter.nbytes for parameter in parameters))
        float32_step(parameters, *args)

    monkeypatch.setattr(host_averages, "float32_step", counting)
    learner = Learner.build(run_config(model, actor={"memory": {"offload": True}}), ranks)
    averages = [t for name, t in learner.actor.optimizer.state().items() if "exp_avg" in name]
    storages = {t.to_local().untyped_storage().data_ptr() for t in averages if isinstance(t, DTensor)}
    assert len(storages) == 1
    take_step(learner, 1)
    largest = max(parameter.nbytes for parameter in learner.actor.network.parameters())
    assert len(sizes) > 4
    assert max(sizes) <= max(5000, largest)
    assert all(float(t.to_local().abs().max()) > 0 for t in averages if isinstance(t, DTensor))
