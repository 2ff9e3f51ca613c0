"""Faults planted in the record of a run, one at a time, and what `paceline verify` says of each.

A forger mends what is easily mended: numbers of events, digests of files, lines, manifests and batches.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from paceline.config.load import dump_yaml
from paceline.config.run import RunConfig
from paceline.controller.batch.collected_batch import Batch
from paceline.controller.batch.dispatch import Order
from paceline.controller.run.records import trajectories
from paceline.controller.verify.check import verify
from paceline.controller.verify.digests import digest_of
from paceline.controller.verify.files.trajectory_files import FileCheck
from paceline.controller.verify.findings import NEVER
from paceline.controller.verify.rows import trajectory_row as rows_of
from paceline.core.digest import file_digest
from paceline.core.errors import LostDataError
from paceline.core.ids import Purpose, TrajectoryId
from paceline.core.policy import PolicyTag
from paceline.core.run_record.manifest import manifest_text
from paceline.core.samples.trajectory import FinishReason, PromptGroup, SamplingSpec, Trajectory
from paceline.core.training import BatchRow, batch_digest
from paceline.wire import blob_digest, encode_trajectory
from support.fake_fleet import FakeServices
from support.memory_broker import MemoryBroker
from support.sequencer_run import config, run_of

CHANGES: dict[str, Any] = {
    "trainer__total_steps": 4,
    "trainer__test_freq": 2,
    "trainer__keep_checkpoints": 9,
    "reward__functions": [{"name": "exact_match"}, {"name": "gsm8k", "weight": 0.5}],
    "algorithm__dynamic_sampling": {"enable": True, "max_extra_factor": 1.0},
    "rollout__val": {"n": 2},
    "data__val_sets": {
        "hard": {
            "files": "hard.jsonl",
            "n": 3,
            "temperature": 1.0,
            "every": 2,
            "reward": {"functions": [{"name": "exact_match", "weight": 2.0}]},
        }
    },
}
Row = dict[str, Any]


def answer(group: PromptGroup, index: int) -> dict[str, Any]:
    """Rewards differ from step to step; prompt 6 is replaced, and prompt 5 of step 2 has no reward."""
    if (group.step, group.prompt_id) == (2, DROPPED):
        return {"reward": None, "reward_error": ("timeout", "slow")}
    right = 0.25 if group.prompt_id == 6 else index + 0.125 * group.step
    if group.context.val_set == "hard":
        return {"reward": 2.0 * right, "reward_error": None, "components": {"exact_match": right}}
    components = {"exact_match": right, "gsm8k": 0.5, "gsm8k/length": 3.0}
    return {"reward": right + 0.25, "reward_error": None, "components": components}


DROPPED = 5


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four steps, with validations before it, after the second step and after the last.

    The set "hard" is left out after the second step.
    """
    folder = tmp_path_factory.mktemp("recorded")
    asyncio.run(live(folder, FakeServices(), MemoryBroker(), CHANGES))
    return folder


async def live(folder: Path, services: FakeServices, broker: MemoryBroker, changes: dict[str, Any]) -> None:
    """One term of a run, to its end."""
    settings = config(**changes)
    async with run_of(settings, folder, services, broker) as it:
        services.writes = True
        await it.enlist_all()
        await it.go(answer)
        it.journal.record("end", ok=True, message="done", step=settings.trainer.total_steps)
    keep(folder, settings)


def keep(folder: Path, settings: RunConfig) -> None:
    """Writes the settings as a controller does."""
    trainer = settings.trainer.model_copy(update={"run_dir": str(folder)})
    (folder / "config.resolved.yaml").write_text(dump_yaml(settings.model_copy(update={"trainer": trainer})))


class Record:
    """A copy of the run's directory. `sealed` edits mend the digest that the journal has of a file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        text = (folder / "events.jsonl").read_text()
        self.events: list[Row] = [json.loads(line) for line in text.splitlines()]

    def write(self) -> None:
        lines = [json.dumps({**event, "n": n}) for n, event in enumerate(self.events)]
        (self.folder / "events.jsonl").write_text("".join(line + "\n" for line in lines))

    def of(self, kind: str, step: int) -> Row:
        return [e for e in self.events if e["event"] == kind and e["step"] == step][-1]

    def samples(self, step: int, purpose: str = "train") -> list[Row]:
        """The admitted trajectories of a step, in batch order."""
        events = [e for e in self.events if e["event"] == "trajectory" and e["verdict"] == "admitted"]
        own = [e for e in events if e["id"].startswith(f"{purpose}:{step}:")]
        return sorted(own, key=lambda e: TrajectoryId.parse(e["id"]))

    def remove(self, gone: Callable[[Row], bool]) -> None:
        self.events = [event for event in self.events if not gone(event)]

    # --- files

    def table(self, name: str, edit: Callable[[list[Row]], object], *, sealed: bool = True) -> None:
        path = self.folder / "trajectories" / f"{name}.parquet"
        table = pyarrow.parquet.read_table(path)
        rows = table.to_pylist()
        edit(rows)
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows, schema=table.schema), path)
        if sealed:
            for event in self.events:
                if event.get("file") == path.name:
                    event.update(digest=file_digest(path), num_rows=len(rows))

    def unlink(self, name: str) -> None:
        (self.folder / "trajectories" / f"{name}.parquet").unlink()
        self.remove(lambda e: e.get("file") == f"{name}.parquet")

    def line(self, step: int, *, sealed: bool = True, **changes: Any) -> None:
        path = self.folder / "metrics.jsonl"
        lines = path.read_text().splitlines()
        assert json.loads(lines[step])["step"] == step
        plain = json.loads(lines[step])
        assert plain.keys() >= changes.keys()
        lines[step] = json.dumps(plain | changes)
        path.write_text("".join(line + "\n" for line in lines))
        if sealed:
            self.of("step", step)["metrics"] = digest_of(lines[step].encode())

    def metrics(self, step: int) -> Row:
        plain: Row = json.loads((self.folder / "metrics.jsonl").read_text().splitlines()[step])
        return plain

    def manifest(self, step: int, edit: Callable[[Row], object], *, sealed: bool = True) -> None:
        path = self.checkpoint(step) / "manifest.json"
        plain = json.loads(path.read_text())
        edit(plain)
        del plain["digest"]
        path.write_text(manifest_text(plain))
        if sealed:
            self.of("checkpoint", step)["manifest"] = digest_of(path.read_bytes())

    def checkpoint(self, step: int) -> Path:
        return self.folder / "checkpoints" / f"step_{step:06d}"

    def mend_batch(self, step: int) -> None:
        """Computes the digest of a batch once more, from the events that there are now."""
        batch = self.of("batch", step)
        out = {e["prompt"] for e in self.events if e["event"] == "group_dropped" and e["step"] == step}
        refills = [e for e in self.events if e["event"] == "refill" and e["step"] == step]
        out |= {prompt for refill in refills for prompt, _ in refill["set_aside"]}
        rows = [
            BatchRow(
                trajectory_id=TrajectoryId.parse(e["id"]),
                blob_key="",
                blob_digest=e["digest"],
                reward=e["reward"],
                num_prompt_tokens=3,
                num_response_tokens=2,
                num_sampled_tokens=2,
            )
            for e in self.samples(step)
            if TrajectoryId.parse(e["id"]).prompt_id not in out
        ]
        digest = batch_digest(PolicyTag.parse(batch["policy"]), rows)
        batch.update(digest=digest, num_rows=len(rows))
        self.of("trained", step)["digest"] = digest


# --- in trajectories/


def in_row(
    field: str, change: Callable[[Any], Any], *, sealed: bool = True, name: str = "step_000002"
) -> Any:
    """Changes a field of a file's second row."""

    def plant(record: Record) -> None:
        def edit(rows: list[Row]) -> None:
            rows[1][field] = change(rows[1][field])

        record.table(name, edit, sealed=sealed)

    return plant


def swap_groups(rows: list[Row]) -> None:
    for field in ("response_token_ids", "response_log_probs", "response_mask", "response"):
        rows[0][field], rows[2][field] = rows[2][field], rows[0][field]


def twice(rows: list[Row]) -> None:
    for field in ("response_token_ids", "response_log_probs"):
        rows[1][field] = rows[1][field] * 2
    for field in ("num_response_tokens", "num_sampled_tokens"):
        rows[1][field] *= 2


def in_table(edit: Callable[[list[Row]], object], name: str = "step_000002") -> Any:
    return lambda record: record.table(name, edit)


def another_steps_file(record: Record) -> None:
    folder = record.folder / "trajectories"
    shutil.copy(folder / "step_000001.parquet", folder / "step_000002.parquet")
    record.of("saved", 2)["digest"] = file_digest(folder / "step_000002.parquet")


# --- in the journal


def two_ids(record: Record) -> None:
    first, second = record.samples(3)[:2]
    second["digest"] = first["digest"]
    record.mend_batch(3)


def two_ids_and_rows(record: Record) -> None:
    two_ids(record)

    def copy(rows: list[Row]) -> None:
        for field in ("response_token_ids", "response_log_probs", "seed", "response"):
            rows[1][field] = rows[0][field]

    record.table("step_000003", copy)


def same_prompts(record: Record) -> None:
    """Step 3 trains the prompts of step 2: in its dispatch, trajectories, batch, file and metrics."""
    before, now = record.of("dispatch", 2)["prompts"], record.of("dispatch", 3)["prompts"]
    renamed = dict(zip(now, before, strict=True))
    record.of("dispatch", 3)["prompts"] = before
    for event in record.events:
        if event["event"] == "trajectory" and event["id"].startswith("train:3:"):
            _, _, prompt, index = event["id"].split(":")
            event["id"] = f"train:3:{renamed.get(int(prompt), prompt)}:{index}"
        if event["event"] == "refill" and event["step"] == 3:
            event["set_aside"] = [[renamed.get(p, p), score] for p, score in event["set_aside"]]
    record.mend_batch(3)

    def rename(rows: list[Row]) -> None:
        for row in rows:
            row["prompt_id"] = renamed.get(row["prompt_id"], row["prompt_id"])
        rows.sort(key=lambda row: (row["prompt_id"], row["sample_index"]))

    record.table("step_000003", rename)


def another_reward(record: Record) -> None:
    record.samples(1)[0]["reward"] = 0.75
    record.mend_batch(1)
    record.table("step_000001", lambda rows: rows[0].update(reward=0.75))


def a_lost_group(record: Record) -> None:
    prompt = TrajectoryId.parse(record.samples(1)[0]["id"]).prompt_id
    record.remove(lambda e: str(e.get("id", "")).startswith(f"train:1:{prompt}:"))
    record.of("dispatch", 1)["prompts"].remove(prompt)
    record.mend_batch(1)
    record.table("step_000001", lambda rows: rows.__delitem__(slice(0, 2)))


def another_refill(record: Record) -> None:
    refill = next(e for e in record.events if e["event"] == "refill" and e["prompts"])
    old = refill["prompts"][0]
    new = next(p for p in range(7) if p not in record.of("dispatch", refill["step"])["prompts"] and p != old)
    refill["prompts"][0] = new


# --- validations


def no_validation(record: Record) -> None:
    record.remove(lambda e: str(e.get("id", "")).startswith("validate:2:"))
    record.table("val_000002", lambda rows: rows.clear())


def no_trace_of_a_validation(record: Record) -> None:
    record.remove(lambda e: str(e.get("id", "")).startswith("validate:2:"))
    record.remove(lambda e: e["event"] == "validate" and e["step"] == 2)
    record.remove(lambda e: e["event"] == "phase" and e["step"] == 2 and "validate" in (e["to"], e["source"]))
    record.unlink("val_000002")


def a_smaller_validation(record: Record) -> None:
    record.of("validate", 2)["sets"][""]["prompts"].remove(1)
    record.remove(lambda e: str(e.get("id", "")).startswith("validate:2:1:"))
    record.table("val_000002", lambda rows: rows.__delitem__(slice(2, 4)))


def a_set_with_fewer_answers(record: Record) -> None:
    record.of("validate", 4)["sets"]["hard"]["num_samples"] = 2


def no_trace_of_a_set(record: Record) -> None:
    del record.of("validate", 4)["sets"]["hard"]
    record.remove(lambda e: str(e.get("id", "")).startswith(("validate:4:2:", "validate:4:3:")))
    record.table("val_000004", lambda rows: rows.__delitem__(slice(4, None)))


def as_before_there_were_sets(record: Record) -> None:
    for event in record.events:
        if event["event"] == "validate" and event["step"] == 2:
            event.update({k: v for k, v in event.pop("sets")[""].items() if k != "right_above"})


def an_answer_under_two_ids(record: Record) -> None:
    first, second = record.samples(2, "validate")[:2]
    second["digest"] = first["digest"]


def an_answer_twice(record: Record) -> None:
    event = record.samples(2, "validate")[0]
    record.events.insert(record.events.index(event), dict(event))


# --- checkpoints


def weights_of_step_3(record: Record, *, sealed: bool) -> None:
    shutil.copy(record.checkpoint(3) / "__0_0.distcp", record.checkpoint(4) / "__0_0.distcp")
    files = json.loads((record.checkpoint(3) / "manifest.json").read_text())["files"]
    record.manifest(4, lambda plain: plain.update(files=files), sealed=sealed)


def checkpoint_of_step_3(record: Record) -> None:
    """All of step 3's checkpoint, with the other number in it."""
    for name in ("__0_0.distcp", "manifest.json"):
        shutil.copy(record.checkpoint(3) / name, record.checkpoint(4) / name)

    def renumber(plain: Row) -> None:
        plain["step"] = plain["controller_state"]["step"] = 4

    record.manifest(4, renumber)


def state_of_step_3(key: str) -> Any:
    def plant(record: Record) -> None:
        earlier = json.loads((record.checkpoint(3) / "manifest.json").read_text())["controller_state"]
        record.manifest(4, lambda plain: plain["controller_state"].update({key: earlier[key]}))

    return plant


def swapped(record: Record) -> None:
    name = "critic/score/mean"
    first, second = record.metrics(1)[name], record.metrics(3)[name]
    record.line(1, **{name: second})
    record.line(3, **{name: first})


def another_metric_everywhere(record: Record) -> None:
    changes = {"perf/tokens_per_s": 5.0}
    record.line(1, **changes)
    record.manifest(1, lambda plain: plain["controller_state"]["metrics"].update(changes))


OTHER = "step_000002.parquet has tokens, mask and log-probs of train:2:"
ANSWER = "val_000002.parquet has tokens, mask and log-probs of validate:2:0:1"
WRITTEN = ".parquet was changed after it was written"
PLANTED: dict[str, tuple[Callable[[Record], object], str]] = {
    # trajectories/, with the journal's digest of the file mended
    "a token changed": (in_row("response_token_ids", lambda t: [t[0] + 1, t[1]]), OTHER),
    "a log-prob changed": (in_row("response_log_probs", lambda t: [t[0] - 2**-20, t[1]]), OTHER),
    "a mask bit changed": (in_row("response_mask", lambda _: [0, 1]), OTHER),
    "a mask bit changed, its count too": (
        in_table(lambda rows: rows[1].update(response_mask=[0, 1], num_sampled_tokens=1)),
        OTHER,
    ),
    "a prompt's token changed": (in_row("prompt_token_ids", lambda t: [9, *t[1:]]), OTHER),
    "tokens of two groups swapped": (in_table(swap_groups), OTHER),
    "a turn's tokens twice": (in_table(twice), OTHER),
    "a segment more": (in_row("segment_starts", lambda _: [1]), OTHER),
    "another seed": (in_row("seed", lambda seed: seed + 1), OTHER),
    "another temperature": (in_row("sampling", lambda s: s.replace("1.0", "0.9", 1)), OTHER),
    "another finish reason": (in_row("finish_reason", lambda _: "length"), OTHER),
    "components that do not make the reward": (
        in_row("components", lambda c: c.replace("0.5", "0.75")),
        "step_000002.parquet has components of train:2:",
    ),
    "a reward changed": (in_row("reward", lambda r: r + 1), "step_000002.parquet has {'step': 2"),
    "the rewards of two samples swapped": (
        in_table(lambda rows: (rows[0].update(reward=1.5), rows[1].update(reward=0.5))),
        "step_000002.parquet has {'step': 2",
    ),
    "another policy version": (
        in_row("policy_version", lambda v: v - 1),
        "step_000002.parquet has {'step': 2",
    ),
    "a row lost": (in_table(lambda rows: rows.pop()), "step_000002.parquet has 3 rows, but 4 were"),
    "a row doubled": (in_table(lambda rows: rows.append(rows[-1])), "step_000002.parquet has 5 rows"),
    "rows in another order": (in_table(lambda rows: rows.reverse()), "step_000002.parquet has {'step': 2"),
    "a file gone": (lambda r: r.unlink("step_000002"), "step_000002.parquet of a finished step was not"),
    "the file of another step": (another_steps_file, "step_000002.parquet has"),
    # as before, but the journal is left alone
    "a response's text changed": (in_row("response", lambda _: "42", sealed=False), WRITTEN),
    "a prompt's text changed": (in_row("prompt", lambda _: "?", sealed=False), WRITTEN),
    "a ground truth changed": (in_row("ground_truth", lambda _: "42", sealed=False), WRITTEN),
    "the learner's log-probs changed": (in_row("learner_log_probs", lambda _: [-1.0], sealed=False), WRITTEN),
    "an answer's components that do not make the reward of its set": (
        in_table(lambda rows: rows[-1].update(components='{"exact_match": 9.0}'), "val_000004"),
        "val_000004.parquet has components of validate:4:3:2 that make a reward of 18; the reward is",
    ),
    # the journal, with batches and files mended
    "one rollout under two ids": (two_ids, "train:3:"),
    "one rollout under two ids, in the file too": (two_ids_and_rows, "has the digest of train:3:"),
    "the prompts of step 2 again in step 3": (same_prompts, "step 3 asked for prompts that are not next"),
    "a prompt that is not next replaces another": (another_refill, "took the prompts ["),
    "a reward changed, in the file too": (another_reward, "step_000001.parquet has components of train:1:"),
    "a group lost": (a_lost_group, "step 1 asked for prompts that are not next"),
    "the cursor of step 3 after step 4": (
        lambda r: r.of("step", 4).update(cursor=r.of("step", 3)["cursor"]),
        "the cursor stands at",
    ),
    # validations
    "a validation's token changed": (
        in_row("response_token_ids", lambda t: [t[0] + 1, t[1]], name="val_000002"),
        ANSWER,
    ),
    "a validation's log-prob changed": (
        in_row("response_log_probs", lambda t: [t[0] - 2**-20, t[1]], name="val_000002"),
        ANSWER,
    ),
    "a validation's text changed": (
        in_row("response", lambda _: "42", sealed=False, name="val_000002"),
        "val_000002" + WRITTEN,
    ),
    "a validation's reward changed in the file": (
        in_row("reward", lambda r: r + 1, name="val_000002"),
        "val_000002.parquet has {'step': 2",
    ),
    "a validation's reward changed in the journal": (
        lambda r: r.samples(2, "validate")[0].update(reward=9.0),
        "has val/reward/mean = ",
    ),
    "a validation's answer lost in the file": (
        in_table(lambda rows: rows.pop(), "val_000002"),
        "val_000002.parquet has 3 rows, but 4 were",
    ),
    "a validation's answer doubled in the file": (
        in_table(lambda rows: rows.append(rows[0]), "val_000002"),
        "val_000002.parquet has 5 rows",
    ),
    "a validation's answer lost in the journal": (
        lambda r: r.events.remove(r.samples(2, "validate")[0]),
        "prompt 0 of the validation of step 2 has 1 of 2 answers",
    ),
    "a validation's answer doubled in the journal": (an_answer_twice, "validate:2:0:0 was admitted twice"),
    "a validation's answer under two ids": (
        an_answer_under_two_ids,
        "has the digest of validate:2:0:",
    ),
    "all answers of a validation gone": (no_validation, "prompt 0 of the validation of step 2 has 0 of 2"),
    "all trace of a validation gone": (
        no_trace_of_a_validation,
        "metrics.jsonl has val/groups_dropped, which does not follow from the journal",
    ),
    "a prompt of a validation gone everywhere": (a_smaller_validation, "has val/num_prompts = 2"),
    "fewer answers asked for in a set": (
        a_set_with_fewer_answers,
        "validate:4:2:2 was admitted, but the validation of step 4 did not ask for it",
    ),
    "a set's answer lost in the journal": (
        lambda r: r.events.remove(r.samples(4, "validate")[-1]),
        "prompt 3 of the validation of step 4 has 2 of 3 answers",
    ),
    "a set's false reward": (
        lambda r: r.line(4, **{"val/hard/reward/mean": 0.99}),
        "has val/hard/reward/mean = 0.99, ",
    ),
    "a set's false pass@k": (
        lambda r: r.line(4, **{"val/hard/pass_at_2": 0.99}),
        "has val/hard/pass_at_2 = 0.99, ",
    ),
    "a set's false component": (
        lambda r: r.line(4, **{"val/hard/exact_match/mean": 0.99}),
        "has val/hard/exact_match/mean = 0.99, ",
    ),
    "a set's false length": (
        lambda r: r.line(4, **{"val/hard/response_length/mean": 99.0}),
        "has val/hard/response_length/mean = 99, ",
    ),
    "all trace of a set gone but its line": (
        no_trace_of_a_set,
        "metrics.jsonl has val/hard/num_prompts, which does not follow from the journal",
    ),
    "a validation's file gone": (lambda r: r.unlink("val_000002"), "val_000002.parquet of a finished step"),
    # checkpoints
    "the weights of step 3 in step 4's checkpoint": (
        lambda r: weights_of_step_3(r, sealed=False),
        "the checkpoint step_000004 has a manifest that was changed after it was written",
    ),
    "the weights of step 3 in step 4's checkpoint, in the journal too": (
        lambda r: weights_of_step_3(r, sealed=True),
        "the checkpoint step_000004 holds the weights of step 3",
    ),
    "step 3's checkpoint as step 4's": (
        checkpoint_of_step_3,
        "the checkpoint step_000004 has the weights of v3@",
    ),
    "the cursor of step 3 in step 4's checkpoint": (
        state_of_step_3("cursor"),
        "the checkpoint step_000004 has the cursor {",
    ),
    "the policy of step 3 in step 4's checkpoint": (
        state_of_step_3("policy"),
        "the checkpoint step_000004 has the weights of v3@",
    ),
    "another state of the guard in a checkpoint": (
        lambda r: r.manifest(4, lambda plain: plain["controller_state"]["guard"].update(lr_scale=0.5)),
        "the checkpoint step_000004 has a state of the guard that differs",
    ),
    "other metrics in a checkpoint": (
        lambda r: r.manifest(4, lambda p: p["controller_state"]["metrics"].update({"actor/ppo_kl": 1.0})),
        "the checkpoint step_000004 has actor/ppo_kl = 1.0, but metrics.jsonl has 0.0",
    ),
    # metrics, with the journal's digest of the line mended
    "a mean reward of 0.99": (
        lambda r: r.line(3, **{"critic/score/mean": 0.99}),
        "the line of step 3 in metrics.jsonl has critic/score/mean = 0.99, but the journal gives",
    ),
    "the mean rewards of two steps swapped": (
        swapped,
        "the line of step 1 in metrics.jsonl has critic/score",
    ),
    "a false number of admitted trajectories": (
        lambda r: r.line(3, **{"barrier/admitted": 7.0}),
        "has barrier/admitted = 7, ",
    ),
    "a false number of dropped groups": (
        lambda r: r.line(2, **{"barrier/groups_dropped": 0.0}),
        "has barrier/groups_dropped = 0, but the journal gives 1",
    ),
    "a false number of repeats": (
        lambda r: r.line(2, **{"barrier/duplicates": 2.0}),
        "has barrier/duplicates = 2, but the journal gives 0",
    ),
    "a false spread of rewards": (lambda r: r.line(3, **{"reward/std": 0.1}), "has reward/std = 0.1, "),
    "a false mean of a component": (
        lambda r: r.line(3, **{"reward/gsm8k/mean": 0.9}),
        "has reward/gsm8k/mean = 0.9, but the journal gives 0.5",
    ),
    "a false validation reward": (
        lambda r: r.line(4, **{"val/reward/mean": 0.99}),
        "has val/reward/mean = 0.99, ",
    ),
    # as before, but the journal is left alone
    "any other metric changed": (
        lambda r: r.line(3, sealed=False, **{"actor/ppo_kl": 0.5}),
        "the line of step 3 in metrics.jsonl was changed after it was written",
    ),
}

UNSEEN: dict[str, tuple[Callable[[Record], object], str]] = {
    "a response's text changed, and the journal's digest of its file": (
        in_row("response", lambda _: "42"),
        "a record that was forged entirely: journal, files and digests",
    ),
    "the learner's log-probs changed, and the journal's digest of their file": (
        in_row("learner_log_probs", lambda _: [-1.0]),
        "the learner's log-probs, texts and times in trajectories/: only that their file is unchanged",
    ),
    "another metric changed everywhere, and the journal's digests of it": (
        another_metric_everywhere,
        NEVER[2],
    ),
}
"""Faults that are not found, and the line that says so."""


def planted(recorded: Path, folder: Path, plant: Callable[[Record], object]) -> list[str]:
    shutil.copytree(recorded, folder, dirs_exist_ok=True)
    settings = folder / "config.resolved.yaml"
    settings.write_text(settings.read_text().replace(str(recorded), str(folder)))
    record = Record(folder)
    plant(record)
    record.write()
    return [str(breach) for breach in verify(folder).breaches]


def test_a_copy_without_a_fault_is_sound(recorded: Path, tmp_path: Path) -> None:
    assert planted(recorded, tmp_path, lambda record: None) == []
    counts = verify(tmp_path).counts
    assert counts["digests of trajectories recomputed"] == counts["rows in parquet files"] == 46
    assert counts["checkpoints on disk"] == 4
    assert verify(tmp_path).unseen == {}


@pytest.mark.parametrize("is_saving", [True, False])
async def test_each_term_is_judged_by_its_own_settings(is_saving: bool, tmp_path: Path) -> None:
    """Files are saved in one term only, and a day lies between the terms."""
    services = FakeServices()
    first = CHANGES | {"trainer__total_steps": 2, "trainer__save_trajectories": is_saving}
    second = CHANGES | {"trainer__save_trajectories": not is_saving}
    await live(tmp_path, services, MemoryBroker(), first)
    num_first = len(Record(tmp_path).events)
    await live(tmp_path, services, MemoryBroker(), second)
    record = Record(tmp_path)
    for event in record.events[num_first:]:
        event["time"] += 86_400
    record.write()
    assert len(list((tmp_path / "trajectories").iterdir())) == (4 if is_saving else 3)
    # Another start may have been refused since, whose settings are no longer those of a term.
    for settings in (first, second, second | {"rollout__n": 5}):
        keep(tmp_path, config(**settings))
        assert [str(breach) for breach in verify(tmp_path).breaches] == []


async def test_the_day_after_a_killed_term_is_no_wait_of_its_phase(tmp_path: Path) -> None:
    services, broker, settings = FakeServices(), MemoryBroker(), config(**CHANGES)
    services.writes = True
    async with run_of(settings, tmp_path, services, broker) as it:
        record = it.journal.record

        def killed(event: str, **fields: Any) -> None:
            record(event, **fields)
            if (fields.get("to"), fields.get("step")) == ("commit", 2):
                raise RuntimeError("killed")

        it.journal.record = killed  # type: ignore[method-assign]
        await it.enlist_all()
        with pytest.raises(RuntimeError, match="killed"):
            await it.go(answer)
    num_first = len(Record(tmp_path).events)
    await live(tmp_path, services, broker, CHANGES)
    resumed = Record(tmp_path)
    for event in resumed.events[num_first:]:
        event["time"] += 86_400
    resumed.write()
    assert [str(breach) for breach in verify(tmp_path).breaches] == []


def test_a_wait_is_judged_by_the_deadlines_of_its_term(recorded: Path, tmp_path: Path) -> None:
    def wait(record: Record) -> None:
        place = next(i for i, e in enumerate(record.events) if e.get("to") == "commit")
        for event in record.events[place + 1 :]:
            event["time"] += 3000

    (breach,) = planted(recorded, tmp_path, wait)
    assert breach.startswith("I5: nothing happened for 3000 s in phase commit")

    def wait_longer(record: Record) -> None:
        wait(record)
        record.events[0]["verify"]["limits"]["commit"] = 2500.0

    assert planted(recorded, tmp_path, wait_longer) == []


@pytest.mark.parametrize("fault", PLANTED)
def test_each_planted_fault_is_told(fault: str, recorded: Path, tmp_path: Path) -> None:
    plant, sentence = PLANTED[fault]
    breaches = planted(recorded, tmp_path, plant)
    assert any(sentence in breach for breach in breaches), breaches


def test_a_validation_of_an_earlier_version_can_be_read(recorded: Path, tmp_path: Path) -> None:
    assert planted(recorded, tmp_path, as_before_there_were_sets) == []


async def test_a_validation_that_begins_again_asks_again(tmp_path: Path) -> None:
    settings, gone = config(**CHANGES), []
    async with run_of(settings, tmp_path, FakeServices(), MemoryBroker()) as it:
        collector = it.sequencer._collector
        collect = collector.collect

        async def collecting(order: Order, *arguments: Any, **options: Any) -> Batch:
            batch = await collect(order, *arguments, **options)
            if order.asks[0].purpose == Purpose.VALIDATE and not gone:
                gone.append(order.step)
                raise LostDataError("the broker is empty")
            return batch

        collector.collect = collecting  # type: ignore[method-assign]
        it.services.writes = True
        await it.enlist_all()
        await it.go(answer)
    keep(tmp_path, settings)
    assert [e["step"] for e in Record(tmp_path).events if e["event"] == "validate"] == [0, 0, 2, 4]
    assert [str(breach) for breach in verify(tmp_path).breaches] == []


async def test_a_run_that_an_earlier_version_began_can_be_read(tmp_path: Path) -> None:
    services = FakeServices()
    await live(tmp_path, services, MemoryBroker(), CHANGES | {"trainer__total_steps": 2})
    record = Record(tmp_path)
    record.remove(lambda e: e["event"] in ("validate", "saved"))
    for event in record.events:
        for key in ("verify", "metrics", "manifest"):
            event.pop(key, None)
    record.write()
    assert [str(breach) for breach in verify(tmp_path).breaches] == []
    await live(tmp_path, services, MemoryBroker(), CHANGES)
    findings = verify(tmp_path)
    assert [str(breach) for breach in findings.breaches] == []
    (unseen,) = findings.unseen
    assert "of a term, which its journal does not record" in unseen
    record = Record(tmp_path)
    record.of("dispatch", 3)["prompts"] = record.of("dispatch", 2)["prompts"]
    record.write()
    assert any("step 3 asked for prompts that are not next" in str(b) for b in verify(tmp_path).breaches)


async def test_the_cursor_goes_back_with_a_rewind(tmp_path: Path) -> None:
    """The learner comes back with the weights of step 1; steps 2 to 4 are run again, over the files there."""
    services, broker, folder = FakeServices(), MemoryBroker(), tmp_path / "run"
    folder.mkdir()
    await live(folder, services, broker, CHANGES)
    services.version = services.source = 1
    services.trained.clear()
    services.standings.clear()
    await live(folder, services, broker, CHANGES)
    record = Record(folder)
    (rewind,) = [e for e in record.events if e["event"] == "rewind"]
    assert [str(breach) for breach in verify(folder).breaches] == []
    rewind["cursor"] = record.of("step", 2)["cursor"]
    record.write()
    breaches = [str(breach) for breach in verify(folder).breaches]
    assert any("the cursor went back to {" in breach for breach in breaches), breaches


@pytest.mark.parametrize(
    ("num_tokens", "temperature", "is_told"), [(40, 1.0, True), (4, 1.0, False), (40, 0.0, False)]
)
def test_one_long_draw_cannot_have_two_ids(
    num_tokens: int, temperature: float, is_told: bool, tmp_path: Path
) -> None:
    """Each row has its own id, seed and digest; equal short answers, and greedy ones, are no fault."""
    policy, rows, table = PolicyTag(version=0, digest="a" * 16), [], []
    sampling = SamplingSpec(temperature=temperature, max_tokens=64)
    for index in range(2):
        drawn = Trajectory(
            run_id="r",
            trajectory_id=TrajectoryId(step=1, purpose="train", prompt_id=3, sample_index=index),
            policy=policy,
            prompt_token_ids=np.array([1], dtype=np.int32),
            response_token_ids=np.arange(num_tokens, dtype=np.int32),
            response_log_probs=np.full(num_tokens, -2.0, dtype=np.float32),
            response_mask=np.ones(num_tokens, dtype=np.uint8),
            finish_reason=FinishReason.STOP,
            sampling=sampling,
            seed=index,
        )
        key, digest = drawn.trajectory_id, blob_digest(encode_trajectory(drawn))
        rows.append(rows_of.TrajectoryRow(key=key, digest=digest, reward=1.0, raw_reward=1.0))
        table.append(
            {"step": 1, "prompt_id": 3, "sample_index": index, "reward": 1.0, "policy_version": 0}
            | {"num_sampled_tokens": num_tokens, "finish_reason": "stop"}
            | trajectories._arrays(drawn, None)
        )
    schema = pyarrow.schema([(n, t) for n, t in trajectories._columns(True) if n in table[0]])
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(table, schema=schema), tmp_path / "step.parquet")
    check = FileCheck(run_id="r", policy=policy, shapes=None, recomputes=True)
    assert check.run(tmp_path / "step.parquet", rows) == check.num_recomputed == 2
    told = "has the same 40 tokens for train:1:3:0 and train:1:3:1, which are drawn with a log-probability"
    assert check.faults == ([f"{told} of -80: one draw has two ids"] if is_told else [])


def test_a_file_of_an_earlier_build_is_compared_by_its_kind_of_digest(recorded: Path, tmp_path: Path) -> None:
    def plant(record: Record) -> None:
        saved = record.of("saved", 2)
        saved["digest"] = file_digest(record.folder / "trajectories" / saved["file"], like="")
        assert ":" not in saved["digest"]

    assert planted(recorded, tmp_path, plant) == []


@pytest.mark.parametrize("fault", UNSEEN)
def test_what_is_not_told_is_listed_as_not_looked_at(fault: str, recorded: Path, tmp_path: Path) -> None:
    plant, sentence = UNSEEN[fault]
    assert planted(recorded, tmp_path, plant) == []
    assert sentence in NEVER
    assert f"unseen    {sentence}" in verify(tmp_path).lines()
