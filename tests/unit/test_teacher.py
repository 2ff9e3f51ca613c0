"""A served teacher: what it is asked, how its tokens reach the learner, and what happens while it is away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from unit.test_reward_consumer import RUN, Bench, Letters

from paceline.broker import Outgoing, names
from paceline.config.training.teacher import TeacherConfig
from paceline.core.errors import ConfigError, InvalidMessageError, LostDataError, RewardError, RewardErrorKind
from paceline.core.ids import Purpose
from paceline.core.samples.teacher_top_k import TeacherTopK
from paceline.core.samples.trajectory import ScoredHeader
from paceline.core.training import BatchRow
from paceline.learner.batch.blobs import fetch_rows
from paceline.reward.consumer import Consumer, ConsumerOptions
from paceline.reward.teacher.policy_tokens import PolicyTokens
from paceline.reward.teacher.teacher import Teacher
from paceline.wire import blob_digest, decode_teacher, decode_trajectory, encode_teacher
from support.fake_teacher import FakeTeacher, log_probs_after, serving
from support.learner_fakes import DictBlobs
from support.trajectories import POLICY, finished_sample

PROMPT, TOP_K, VOCAB_SIZE = [1, 2, 3], 4, 50


def encode(text: str) -> list[int]:
    return [ord(letter) % VOCAB_SIZE for letter in text]


TOKENS = PolicyTokens(probe="a probe", probe_ids=tuple(encode("a probe")), longest=100, vocab_size=VOCAB_SIZE)


def likeliest(before: Sequence[int]) -> tuple[list[int], list[float]]:
    log_probs = log_probs_after(before, VOCAB_SIZE)
    ids = np.argsort(-log_probs)[:TOP_K]
    return ids.tolist(), log_probs[ids].tolist()


def config(port: int, **options: Any) -> TeacherConfig:
    tree = {"address": f"http://127.0.0.1:{port}/v1", "model": "big", "top_k": TOP_K, **options}
    return TeacherConfig.model_validate(tree)


@asynccontextmanager
async def taught(fake: FakeTeacher, tokens: PolicyTokens = TOKENS, **options: Any) -> AsyncIterator[Teacher]:
    async with serving(fake) as port:
        teacher = Teacher(config(port, **options), tokens)
        try:
            yield teacher
        finally:
            await teacher.close()


def trajectory_of(message: Outgoing) -> Any:
    (blob,) = message.blobs.values()  # type: ignore[union-attr]
    return decode_trajectory(blob)


async def test_it_gives_its_likeliest_tokens_at_every_sampled_token() -> None:
    fake = FakeTeacher(encode)
    response, mask = [7, 8, 9, 10], [1, 0, 1, 1]
    async with taught(fake) as teacher:
        top_k = await teacher.top_k(trajectory_of(finished_sample(RUN, 5, response, mask=mask)))
    assert fake.completions[-1] == {
        "model": "big",
        "prompt": PROMPT + response,
        "max_tokens": 1,
        "temperature": 0.0,
        "prompt_logprobs": TOP_K,
        "return_tokens_as_token_ids": True,
    }
    for place, is_sampled in enumerate(mask):
        ids, log_probs = likeliest(PROMPT + response[:place]) if is_sampled else ([0] * TOP_K, [0.0] * TOP_K)
        assert top_k.token_ids[place].tolist() == ids
        assert top_k.log_probs[place].tolist() == pytest.approx(log_probs, abs=1e-6)
    assert (top_k.token_ids.dtype, top_k.log_probs.dtype) == (np.int32, np.float32)


async def test_a_rewritten_history_is_a_sequence_of_its_own() -> None:
    """A segment does not see what was before it, and one without sampled tokens is not sent."""
    fake = FakeTeacher(encode)
    response, mask = [7, 8, 20, 21, 30, 31, 32], [1, 1, 0, 0, 0, 1, 1]
    message = finished_sample(RUN, 5, response, mask=mask, segment_starts=[2, 4])
    async with taught(fake) as teacher:
        top_k = await teacher.top_k(trajectory_of(message))
    assert [body["prompt"] for body in fake.completions[1:]] == [[*PROMPT, 7, 8], [30, 31, 32]]
    assert top_k.token_ids[1].tolist() == likeliest([*PROMPT, 7])[0]
    assert top_k.token_ids[5].tolist() == likeliest([30])[0]
    assert top_k.token_ids[6].tolist() == likeliest([30, 31])[0]


class Taught(Bench):
    """A consumer with a teacher."""

    def __init__(self, teacher: Teacher) -> None:
        super().__init__()
        options = ConsumerOptions(run_id=RUN, member_id="reward-0")
        self.consumer = Consumer(
            broker=self.broker, scorer=self.scorer, tokenizer=Letters(), options=options, teacher=teacher
        )

    async def teacher_blob(self, header: ScoredHeader) -> bytes:
        key = names.teacher_top_k(header.blob_key, header.teacher_digest)
        (blob,) = await self.broker.get_blobs([key])
        assert blob is not None
        return blob


async def test_its_tokens_travel_beside_the_score_with_their_digest() -> None:
    async with taught(FakeTeacher(encode)) as teacher:
        bench = Taught(teacher)
        await bench.broker.append(
            [
                finished_sample(RUN, 5, [7, 8]),
                finished_sample(RUN, 6, [7], purpose=Purpose.GREEDY),
                finished_sample(RUN, 7, [7], purpose=Purpose.VALIDATE),
            ]
        )
        async with bench.working():
            headers = {h.trajectory_id.prompt_id: h for h in await bench.headers(3)}
        blob = await bench.teacher_blob(headers[5])
    assert headers[5].teacher_digest == blob_digest(blob)
    assert headers[5].reward == 2.0
    top_k = decode_teacher(blob, of=headers[5].blob_digest, mask=np.ones(2, np.uint8), vocab_size=VOCAB_SIZE)
    assert top_k.token_ids.tolist() == [likeliest(PROMPT)[0], likeliest([*PROMPT, 7])[0]]
    assert headers[6].teacher_digest == headers[7].teacher_digest == ""


async def test_a_second_answer_replaces_nothing() -> None:
    """The repeat of a delivery is asked again, and its numbers differ in the last bits."""
    fake = FakeTeacher(encode)
    async with taught(fake) as teacher:
        bench = Taught(teacher)
        async with bench.working():
            await bench.broker.append([finished_sample(RUN, 5, [7, 8])])
            (first,) = await bench.headers(1)

            def nudge(tree: dict[str, Any]) -> None:
                for entry in tree["choices"][0]["prompt_logprobs"][1:]:
                    for part in entry.values():
                        part["logprob"] -= 1e-3

            fake.spoil = nudge
            await bench.broker.append([finished_sample(RUN, 5, [7, 8])])
            (second,) = await bench.headers(1)
        assert first.blob_key == second.blob_key
        assert first.teacher_digest != second.teacher_digest
        assert blob_digest(await bench.teacher_blob(first)) == first.teacher_digest


async def test_while_it_is_away_its_samples_wait_and_then_it_is_compared_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake, said = FakeTeacher(encode), []
    monkeypatch.setattr("paceline.reward.teacher.teacher._FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr("paceline.reward.outside.breaker._FIRST_PAUSE_S", 0.01)
    async with serving(fake) as port:
        teacher = Teacher(config(port), TOKENS, said.append)
        bench = Taught(teacher)
        await teacher.start()
        async with bench.working() as working:
            await bench.broker.append([finished_sample(RUN, 5, [7, 8])])
            await bench.headers(1)
            fake.refuse = 503
            await bench.broker.append([finished_sample(RUN, 6 + n, [7, 8]) for n in range(6)])
            async with asyncio.timeout(60):
                while not said:  # noqa: ASYNC110  the breaker says that it has opened
                    await asyncio.sleep(0.01)
            assert not working.done()
            fake.refuse, before = 0, fake.paths.count("/tokenize")
            headers = await bench.headers(6)
        await teacher.close()
    assert all(header.reward == 2.0 and header.teacher_digest for header in headers)
    assert fake.paths.count("/tokenize") == before + 1
    assert "did not answer 5 times in a row: status 503" in said[0]
    assert said[-1].endswith("answers again")


async def test_a_teacher_that_stays_away_is_the_samples_error() -> None:
    async with serving(FakeTeacher(encode)) as port:
        pass
    teacher = Teacher(config(port, retry_for_s=0), TOKENS)
    await teacher.start()  # it may still come up
    bench = Taught(teacher)
    await bench.broker.append([finished_sample(RUN, 5, [7, 8])])
    async with bench.working():
        (header,) = await bench.headers(1)
    await teacher.close()
    assert header.reward is None
    assert header.reward_error is not None
    assert header.reward_error[0] == "unavailable"
    assert f"the teacher at http://127.0.0.1:{port}/v1" in header.reward_error[1]
    assert len(bench.scorer.items) == ConsumerOptions(run_id="", member_id="").max_deliveries


@pytest.mark.parametrize(
    ("fake", "options", "sentence"),
    [
        (FakeTeacher(lambda text: encode(text)[:-1]), {}, "another tokenizer than the policy: .* 6 tokens"),
        (FakeTeacher(lambda text: encode(text)[::-1]), {}, "another tokenizer than the policy"),
        (FakeTeacher(encode, model="small"), {}, "serves no model 'big', but small; correct"),
        (FakeTeacher(encode, max_model_len=100), {}, "up to 100 tokens, .* --max-model-len 101"),
        (FakeTeacher(encode), {"top_k": 21}, "greater than max allowed: 20.*--max-logprobs 21"),
    ],
)
async def test_what_is_no_teacher_for_this_policy_is_refused_with_a_sentence(
    fake: FakeTeacher, options: dict[str, Any], sentence: str
) -> None:
    async with taught(fake, **options) as teacher:
        with pytest.raises(ConfigError, match=sentence):
            await teacher.start()
    assert [body["prompt"] for body in fake.completions] in ([], [list(TOKENS.probe_ids[:2])])


async def test_a_token_beyond_the_policys_vocabulary_is_an_error_of_the_sample() -> None:
    async with taught(FakeTeacher(encode), replace(TOKENS, vocab_size=8)) as teacher:
        with pytest.raises(RewardError, match="the policy has only 8 tokens") as caught:
            await teacher.top_k(trajectory_of(finished_sample(RUN, 5, [7, 6, 5])))
    assert caught.value.kind is RewardErrorKind.WRONG_TYPE


def _one_less(tree: dict[str, Any]) -> None:
    tree["choices"][0]["prompt_logprobs"].pop()


def _one_more(tree: dict[str, Any]) -> None:
    tree["choices"][0]["prompt_logprobs"].append(None)


def _other_sequence(tree: dict[str, Any]) -> None:
    del tree["choices"][0]["prompt_logprobs"][-1]["8"]


def _few(tree: dict[str, Any]) -> None:
    for entry in tree["choices"][0]["prompt_logprobs"][1:]:
        for token in list(entry)[TOP_K - 1 :]:
            del entry[token]


def _none(tree: dict[str, Any]) -> None:
    tree["choices"][0]["prompt_logprobs"] = None


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (_one_less, "no prompt_logprobs of 5 tokens"),
        (_one_more, "6 prompt_logprobs for 5 tokens"),
        (_other_sequence, "another sequence: it has no log-prob of its token 8"),
        (_few, "3 log-probs per token where 4 were asked for"),
        (_none, "no prompt_logprobs"),
    ],
)
async def test_an_answer_about_something_else_is_no_answer(spoil: Any, sentence: str) -> None:
    fake = FakeTeacher(encode)
    async with taught(fake) as teacher:
        await teacher.start()
        fake.spoil = spoil
        with pytest.raises(RewardError, match=sentence) as caught:
            await teacher.top_k(trajectory_of(finished_sample(RUN, 5, [7, 8])))
    assert caught.value.kind is RewardErrorKind.WRONG_TYPE


async def test_its_key_is_sent_and_must_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="algorithm.teacher takes its key from TEACHER_KEY"):
        Teacher(config(1, key_env="TEACHER_KEY"), TOKENS)
    monkeypatch.setenv("TEACHER_KEY", "secret")
    fake = FakeTeacher(encode)
    async with taught(fake, key_env="TEACHER_KEY") as teacher:
        await teacher.start()
    assert all("authorization: bearer secret" in head.lower() for head in fake.headers)


def top_k(ids: Sequence[Sequence[int]], log_probs: Sequence[Sequence[float]]) -> TeacherTopK:
    return TeacherTopK(token_ids=np.array(ids, np.int32), log_probs=np.array(log_probs, np.float32))


OF = "ab" * 16
GOOD = top_k([[3, 4], [0, 0], [5, 6]], [[-0.5, -1.0], [0.0, 0.0], [-0.1, -3.0]])
MASK = np.array([1, 0, 1], np.uint8)


def test_a_blob_has_what_was_put_in_and_the_digest_of_its_sample() -> None:
    blob = encode_teacher(GOOD, of=OF)
    back = decode_teacher(blob, of=OF, mask=MASK, vocab_size=7)
    assert np.array_equal(back.token_ids, GOOD.token_ids)
    assert np.array_equal(back.log_probs, GOOD.log_probs)
    assert len(blob) < 24 * 2 + 200


@pytest.mark.parametrize(
    ("teacher", "changes", "reason"),
    [
        (GOOD, {"of": "cd" * 16}, "inconsistent"),
        (GOOD, {"mask": np.ones(2, np.uint8)}, "too_large"),
        (GOOD, {"mask": np.ones(4, np.uint8)}, "unequal_lengths"),
        (GOOD, {"vocab_size": 6}, "out_of_range"),
        (GOOD, {"mask": np.ones(3, np.uint8)}, "inconsistent"),  # the middle has a token twice
        (replace(GOOD, log_probs=GOOD.log_probs + 0.2), {}, "out_of_range"),
        (replace(GOOD, log_probs=GOOD.log_probs * np.float32(np.nan)), {}, "out_of_range"),
        (replace(GOOD, token_ids=-GOOD.token_ids), {}, "out_of_range"),
    ],
)
def test_a_blob_that_does_not_fit_is_rejected(
    teacher: TeacherTopK, changes: dict[str, Any], reason: str
) -> None:
    with pytest.raises(InvalidMessageError) as caught:
        decode_teacher(encode_teacher(teacher, of=OF), **{"of": OF, "mask": MASK, **changes})
    assert caught.value.reason == reason


def fetched(blobs: dict[str, bytes], row: BatchRow, *, has_teacher: bool = True) -> Any:
    store = DictBlobs(blobs)
    return fetch_rows(store, {0: row}, [0], policy=POLICY, vocab_size=VOCAB_SIZE, has_teacher=has_teacher)[0]


def test_the_learner_takes_the_bytes_that_the_header_names_and_no_others() -> None:
    message = finished_sample(RUN, 5, [7, 8, 9], mask=[1, 0, 1])
    ((key, blob),) = message.blobs.items()  # type: ignore[union-attr]
    taught = encode_teacher(GOOD, of=blob_digest(blob))
    row = BatchRow(
        trajectory_id=decode_trajectory(blob).trajectory_id,
        blob_key=key,
        blob_digest=blob_digest(blob),
        reward=0.0,
        num_prompt_tokens=3,
        num_response_tokens=3,
        num_sampled_tokens=2,
        teacher_digest=blob_digest(taught),
    )
    name = names.teacher_top_k(key, row.teacher_digest)
    assert np.array_equal(fetched({key: blob, name: taught}, row).teacher.token_ids, GOOD.token_ids)
    other = encode_teacher(replace(GOOD, log_probs=GOOD.log_probs - 1e-3), of=row.blob_digest)
    with pytest.raises(
        LostDataError, match="the teacher's tokens for trajectory train:4:5:0 have the digest"
    ):
        fetched({key: blob, name: other}, row)
    with pytest.raises(LostDataError, match="was scored without a teacher"):
        fetched({key: blob}, replace(row, teacher_digest=""))
    assert fetched({key: blob}, replace(row, teacher_digest=""), has_teacher=False).teacher is None
