"""Prompts with images in vLLM, against a Hugging Face forward pass, before and after a push."""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch

from paceline.config.load import parse
from paceline.config.run import RunConfig
from paceline.core.errors import InvalidMessageError, PacelineError
from paceline.core.samples.images import LoadedImage
from paceline.core.samples.trajectory import SamplingSpec
from paceline.learner.distributed.publisher import WeightPublisher
from paceline.rollout.engines.base import Sample, SampleRequest
from paceline.rollout.engines.vllm.engine import VllmEngine
from paceline.rollout.engines.vllm.images.vision import ImageSender, prompt_with_images
from paceline.weights.digest.agreement import model_digest
from paceline.weights.plan.spec import WeightGroupSpec
from paceline.wire import image_of
from support.image_rows import reference_logits
from support.tiny_vl import drawn_image, save_tiny_vl, tiny_vl_config, tiny_vl_model

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed"),
    pytest.mark.torch,
    pytest.mark.timeout(900),
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.filterwarnings("ignore"),  # vLLM and its imports warn about themselves
]

SPEC = SamplingSpec(temperature=0.0, max_tokens=8)


@dataclass(frozen=True, kw_only=True)
class Setup:
    """An engine that holds the weights of `model`, and how to push them anew."""

    engine: VllmEngine
    model: Any
    push: Callable[[], Any]
    folder: Path


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["qwen2_5_vl", "qwen3_vl"])
async def setup(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Setup]:
    before, kind = dict(os.environ), str(request.param)
    folder = save_tiny_vl(tmp_path_factory.mktemp("tiny"), kind=kind, weights=False)
    config = parse(
        RunConfig,
        {
            "data": {"train_files": "x.parquet", "max_prompt_length": 112, "max_response_length": 16},
            "model": {"path": str(folder)},
            # Small blocks, so that a prompt fills some: a stale prefix cache would show.
            "rollout": {
                "max_num_seqs": 8,
                "threads": 1,
                "sampler": "engine",
                "engine_kwargs": {"block_size": 32},
            },
            "reward": {"functions": [{"name": "exact_match"}]},
            "trainer": {"total_steps": 1},
        },
    )
    engine = await VllmEngine.start(config)
    model = tiny_vl_model(1, kind)
    publisher, threads = WeightPublisher(model, torch.device("cpu")), ThreadPoolExecutor(max_workers=1)
    versions = iter(range(100))

    async def in_thread(call: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(threads, call)

    async def push() -> None:
        version = next(versions)
        sending = asyncio.ensure_future(in_thread(lambda: publisher.publish(version)))
        received = await engine.receive(version, 60.0)
        sent = await sending
        assert model_digest(received.reports) == model_digest(sent.reports)

    host, port = publisher.open_store()
    spec = WeightGroupSpec(
        epoch=1,
        backend="gloo",
        store_host=host,
        store_port=port,
        learner_layouts=(publisher.layout(),),
        rollout_layouts=await engine.describe(),
        wire_dtype="float32",
        timeout_s=60.0,
    )
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(in_thread(lambda: publisher.join(spec)))
        tasks.create_task(engine.join(spec, spec.num_learners, 60.0))
    assert not spec.rollout_layouts[0].full_tensors, "the tower is pushed in place, too"
    await push()
    yield Setup(engine=engine, model=model, push=push, folder=folder)
    publisher.leave()
    threads.shutdown()
    await engine.shutdown()
    os.environ.clear()
    os.environ.update(before)
    gc.collect()  # vLLM leaves a ZeroMQ context to the collector, which warns: let it do so here


def loaded(setup: Setup, *images: Any) -> list[LoadedImage]:
    """The images as the controller makes them."""
    from transformers import AutoImageProcessor

    processor = AutoImageProcessor.from_pretrained(setup.folder, backend="pil", local_files_only=True)
    made = []
    for image in images:
        output = processor([image])
        grid = tuple(int(size) for size in output["image_grid_thw"][0])
        made.append(LoadedImage(image=image_of(output["pixel_values"], grid), pixels=output["pixel_values"]))
    return made


def request(name: str, images: Sequence[LoadedImage], **changes: Any) -> SampleRequest:
    """A prompt that shows each image and asks a little."""
    config, ids = tiny_vl_config(), [11, 12]
    for image in images:
        length = image.image.num_patches // 4
        ids += [config.vision_start_token_id, *[config.image_token_id] * length, config.vision_end_token_id]
    ids += list(range(30, 64))
    made = SampleRequest(request_id=name, prompt_token_ids=ids, sampling=SPEC, seed=3, images=images)
    return replace(made, **changes)


@torch.no_grad()
def reference(model: Any, asked: SampleRequest, response: Sequence[int]) -> np.ndarray:
    """Log-probabilities (R, vocabulary) of a float32 forward pass at the response's positions."""
    prompt = torch.tensor(asked.prompt_token_ids)
    ids = torch.cat([prompt, torch.tensor(response)])[None]
    kinds = torch.zeros_like(ids, dtype=torch.int32)
    kinds[0, : len(prompt)] = prompt == model.config.image_token_id
    pixels = grids = None
    if asked.images:
        grids = torch.tensor([image.image.grid for image in asked.images])
        pixels = torch.from_numpy(np.concatenate([image.pixels for image in asked.images]))
    logits = reference_logits(model, ids, kinds, pixels, grids)
    return torch.log_softmax(logits[len(prompt) - 1 : -1], dim=-1).numpy()


def assert_drawn_from(model: Any, asked: SampleRequest, sample: Sample) -> None:
    full = reference(model, asked, sample.token_ids.tolist())
    expected = full[np.arange(len(sample.token_ids)), sample.token_ids]
    np.testing.assert_allclose(sample.log_probs, expected, atol=1e-4)
    if asked.sampling.temperature == 0:
        np.testing.assert_allclose(expected, full.max(axis=1), atol=1e-4)


async def test_log_probs_are_those_of_a_forward_pass_with_the_images(setup: Setup) -> None:
    first, second, wide = loaded(setup, drawn_image(1), drawn_image(2), drawn_image(3, 200, 60))
    sampled = replace(SPEC, temperature=1.0)
    asked = [
        request("none", []),
        request("first", [first]),
        request("second", [second]),
        request("both", [first, second]),
        request("turned", [second, first]),
        request("wide", [wide, first], sampling=sampled),
        # The same image in a batch with itself.
        *[request(f"sample {seed}", [second], sampling=sampled, seed=seed) for seed in range(3)],
    ]
    samples = await setup.engine.generate(asked)
    for each, sample in zip(asked, samples, strict=True):
        assert_drawn_from(setup.model, each, sample)
    drawn = [sample.token_ids.tolist() for sample in samples[:5]]
    assert len({str(ids) for ids in drawn}) == 5, "the images make no difference: the test shows nothing"


async def test_no_embedding_of_an_image_outlives_a_push(setup: Setup) -> None:
    """What the tower made of an image is kept by the image's hash, which a push does not change.

    No salt here, which would keep versions apart too.
    """
    (image,) = loaded(setup, drawn_image(5))
    asked = request("before", [image])
    (before,) = await setup.engine.generate([asked])
    assert_drawn_from(setup.model, asked, before)
    with torch.no_grad():
        for parameter in setup.model.model.visual.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(9)))
    await setup.push()
    again = replace(asked, request_id="after")
    (after,) = await setup.engine.generate([again])
    assert_drawn_from(setup.model, again, after)
    changed = reference(setup.model, asked, before.token_ids.tolist())
    kept = changed[np.arange(len(before.token_ids)), before.token_ids]
    assert np.abs(kept - before.log_probs).max() > 0.01, "the push changed nothing: the test shows nothing"


async def test_images_that_do_not_fit_are_refused_and_the_engine_lives_on(setup: Setup) -> None:
    (image,) = loaded(setup, drawn_image(1))
    fine = request("fine", [image])
    ids = list(fine.prompt_token_ids)
    placeholder = tiny_vl_config().image_token_id
    fewer, apart = [*ids], [*ids]
    fewer.remove(placeholder)
    at = ids.index(placeholder)
    apart[at : at + 2] = [placeholder, 30]
    apart.append(placeholder)
    narrow = LoadedImage(image=image.image, pixels=image.pixels[:, :-3])
    for changes, message in [
        ({"prompt_token_ids": fewer}, "image 0 .* needs 4 placeholders side by side"),
        ({"prompt_token_ids": apart}, "image 0 .* needs 4 placeholders side by side"),
        (
            {"prompt_token_ids": [*ids, placeholder]},
            "has 5 placeholders of images, and its 1 images take 4",
        ),
        ({"images": [image, image]}, "image 1 .* needs 4 placeholders"),
        ({"images": [narrow]}, "image 0 .* patches of 1173 numbers"),
    ]:
        with pytest.raises(InvalidMessageError, match=message):
            await setup.engine.generate([replace(fine, **changes)])
    (sample,) = await setup.engine.generate([fine])
    assert_drawn_from(setup.model, fine, sample)


def sent_bytes(engine: VllmEngine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Fills with the bytes of each message that goes to the engine's process from now on."""
    socket = engine._llm.engine_core.input_socket
    sent, send = list[int](), socket.send_multipart

    def counted(frames: Sequence[Any], **options: Any) -> Any:
        sent.append(sum(len(memoryview(frame).cast("B")) for frame in frames))
        return send(frames, **options)

    monkeypatch.setattr(socket, "send_multipart", counted)
    return sent


async def drawn_alone(setup: Setup, asked: Sequence[SampleRequest]) -> list[Sample]:
    """One after the other, so that a repetition has the same batches; nothing is kept from before."""
    await setup.push()
    return [(await setup.engine.generate([each]))[0] for each in asked]


async def test_an_images_pixels_go_to_the_engine_once_until_a_push(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = loaded(setup, drawn_image(6, 84, 84), drawn_image(7, 112, 56))
    sampled = replace(SPEC, temperature=1.0)
    group = [request(f"{n}", [first, second], sampling=sampled, seed=n) for n in range(8)]
    pixels = first.pixels.nbytes + second.pixels.nbytes
    await setup.push()
    sent = sent_bytes(setup.engine, monkeypatch)
    samples = await setup.engine.generate(group)
    assert pixels < sum(sent) < 1.5 * pixels, sent
    assert max(sent) > pixels > 8 * sorted(sent)[-2], "not in one message"
    for each, sample in zip(group, samples, strict=True):
        assert_drawn_from(setup.model, each, sample)
    # Another group, other places in the prompt: the engine has both.
    sent.clear()
    turned = request("turned", [second, first, second])
    (sample,) = await setup.engine.generate([turned])
    assert sum(sent) < first.pixels.nbytes / 4, sent
    assert_drawn_from(setup.model, turned, sample)
    # A push clears the engine's cache, and the list of what is there.
    await setup.push()
    sent.clear()
    (sample,) = await setup.engine.generate([turned])
    assert pixels < sum(sent) < 1.5 * pixels, sent
    assert_drawn_from(setup.model, turned, sample)


async def test_samples_are_the_same_to_the_bit_when_every_request_brings_its_pixels(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = loaded(setup, drawn_image(6, 84, 84), drawn_image(7, 112, 56))
    sampled = replace(SPEC, temperature=1.0)
    group = [request(f"{n}", [first, second], sampling=sampled, seed=n) for n in range(4)]
    sent = sent_bytes(setup.engine, monkeypatch)
    shared = await drawn_alone(setup, group)
    num_shared = sum(sent)
    monkeypatch.setattr(setup.engine._llm.input_processor, "inject_into_mm_cache", lambda *_: None)
    sent.clear()
    repeated = await drawn_alone(setup, group)
    assert sum(sent) - num_shared > 2.9 * (first.pixels.nbytes + second.pixels.nbytes)
    for a, b in zip(shared, repeated, strict=True):
        assert a.token_ids.tolist() == b.token_ids.tolist()
        assert a.log_probs.tolist() == b.log_probs.tolist()
    assert len({str(sample.token_ids) for sample in shared}) > 1


async def test_both_sides_drop_the_same_images_when_there_are_too_many(setup: Setup) -> None:
    """vLLM's two caches with room for four images: the engine's side never lacks what it is not sent."""
    from vllm.multimodal.cache import lru
    from vllm.v1.engine.input_processor import InputProcessor

    images = loaded(setup, *[drawn_image(20 + n) for n in range(8)])
    room = SimpleNamespace(mm_processor_cache_gb=4.5 * images[0].pixels.nbytes / 2**30)
    config = SimpleNamespace(get_multimodal_config=lambda: room)
    listed, kept = lru.LruKeyReplicatedSenderCache(config), lru.LruKeyReplicatedReceiverCache(config)
    renderer = SimpleNamespace(mm_processor_cache=listed, update_mm_cache_stats=lambda: None)
    injector = SimpleNamespace(renderer=renderer)
    sent = list[int]()

    async def add_request(name: str, prompt: Any, params: object) -> None:
        items = prompt["mm_kwargs"]["image"]
        sent.append(sum(item is not None for item in items))
        pairs = zip(prompt["mm_hashes"]["image"], items, strict=True)
        features = [SimpleNamespace(mm_hash=key, identifier=key, data=item) for key, item in pairs]
        kept.get_and_update_features(features)
        for feature, image in zip(features, asked[name].images, strict=True):
            np.testing.assert_array_equal(feature.data["pixel_values"].data.numpy(), image.pixels)

    def inject(hashes: Any, kwargs: Any) -> None:
        InputProcessor.inject_into_mm_cache(injector, hashes, kwargs)

    llm = SimpleNamespace(
        renderer=renderer,
        input_processor=SimpleNamespace(inject_into_mm_cache=inject),
        add_request=add_request,
    )
    rng, sender = np.random.default_rng(4), ImageSender()
    asked = {
        f"{n}": request(f"{n}", [images[i] for i in rng.integers(0, len(images), rng.integers(1, 5))])
        for n in range(300)
    }
    for name, each in asked.items():
        prompt = prompt_with_images(each, tiny_vl_config())
        missing = {key for key in prompt["mm_hashes"]["image"] if not listed.is_cached_item(key)}
        await sender.send(llm, name, prompt, None)
        assert sent[-1] == len(missing)
    shown = sum(len(each.images) for each in asked.values())
    assert 0.2 * shown < sum(sent) < 0.8 * shown


async def test_versions_share_no_embedding_of_an_image(setup: Setup) -> None:
    """What the tower made of it is kept by this name."""
    (image,) = loaded(setup, drawn_image(1))
    names = [
        prompt_with_images(request("r", [image], cache_salt=salt), tiny_vl_config())["mm_hashes"]["image"]
        for salt in ("v1:a", "v2:b", "v1:a")
    ]
    assert names[0] == names[2] != names[1]


async def test_an_image_that_the_engine_lacks_fails_once_and_is_sent_again(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    (image,) = loaded(setup, drawn_image(8))
    asked = request("asked", [image])
    await setup.engine.generate([asked])
    # As if a request had been lost on its way.
    await setup.engine._llm.engine_core.reset_mm_cache_async()
    with pytest.raises(PacelineError, match="finish reason 'error'"):
        await setup.engine.generate([asked])
    (sample,) = await setup.engine.generate([asked])
    assert_drawn_from(setup.model, asked, sample)


async def test_a_request_that_is_refused_or_called_off_leaves_its_image_to_be_sent(setup: Setup) -> None:
    (image,) = loaded(setup, drawn_image(9))
    asked = request("asked", [image])
    with pytest.raises(InvalidMessageError, match="refuses request long"):
        await setup.engine.generate([replace(asked, request_id="long", prompt_token_ids=[
            *asked.prompt_token_ids, *[30] * 200,
        ])])  # fmt: skip
    (sample,) = await setup.engine.generate([asked])
    assert_drawn_from(setup.model, asked, sample)
    await setup.push()
    drawing = asyncio.create_task(
        setup.engine.generate([replace(asked, request_id=f"{n}") for n in range(8)])
    )
    await asyncio.sleep(0)
    drawing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await drawing
    (sample,) = await setup.engine.generate([asked])
    assert_drawn_from(setup.model, asked, sample)
