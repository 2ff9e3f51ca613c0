"""Images of rows: read, counted in tokens, processed once; what each fault says."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.checks import data_checks, model_checks
from paceline.config.data import DataConfig
from paceline.config.load import parse
from paceline.config.run import RunConfig
from paceline.config.tuning import DpoRunConfig, RmRunConfig, SftRunConfig
from paceline.controller.batch.inputs import load_inputs
from paceline.core.errors import ConfigError, DataError, ModelError
from paceline.data import images as data_images
from paceline.data.images import ImageReader
from paceline.data.prompts import Prompt, PromptSet, load_tokenizer
from paceline.data.reading.prompt_reader import PromptReader
from paceline.wire.fields import Limits
from support.cli_configs import config
from support.tiny_vl import IMAGE, drawn_image, save_tiny_vl

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_vl(tmp_path_factory.mktemp("model"), weights=False)


def png(seed: int, width: int = 70, height: int = 56) -> bytes:
    content = io.BytesIO()
    drawn_image(seed, width, height).save(content, "PNG")
    return content.getvalue()


def load(model: Path, file: Path, **changes: Any) -> tuple[PromptSet, ImageReader]:
    config = DataConfig(
        train_files=(str(file),), **({"image_key": "images", "prompt_format": "chat"} | changes)
    )
    images = ImageReader.load(config, model)
    assert images is not None
    reader = PromptReader(data=config, tokenizer=load_tokenizer(model), images=images)
    return reader.read(config.training_sets[0]), images


def jsonl(folder: Path, *rows: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps({"ground_truth": "1", **row}) + "\n" for row in rows))
    return file


def text(model: Path, prompt: Prompt) -> str:
    return load_tokenizer(model).decode(prompt.token_ids.tolist(), skip_special_tokens=False)


def user(*parts: str) -> str:
    return (
        "<|im_start|>system\nBe of help.<|im_end|>\n<|im_start|>user\n"
        + "".join(parts)
        + "<|im_end|>\n<|im_start|>assistant\n"
    )


def shown(num_tokens: int) -> str:
    return "<|vision_start|>" + IMAGE * num_tokens + "<|vision_end|>"


def test_a_placeholder_is_there_once_per_token_and_the_pixels_are_the_processors(
    model: Path, tmp_path: Path
) -> None:
    from transformers import AutoImageProcessor

    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "a.png").write_bytes(png(1))
    (tmp_path / "pictures" / "b.png").write_bytes(png(2, 200, 60))
    file = jsonl(
        tmp_path,
        {"prompt": "What is <image> here?", "images": "pictures/a.png"},
        {"prompt": "Which, <image> or <image>?", "images": ["pictures/b.png", "pictures/a.png"]},
        {"prompt": "No place", "images": ["pictures/a.png"]},
        {"prompt": "No image", "images": None},
        {
            "prompt": [
                {"role": "system", "content": "Look."},
                {
                    "role": "user",
                    "content": [{"type": "text", "text": "See"}, {"type": "image", "text": None}],
                },
            ],
            "images": ["pictures/a.png"],
        },
    )
    prompts, images = load(model, file)
    rendered = [text(model, prompt) for prompt in prompts.prompts.values()]
    assert rendered == [
        user("What is ", shown(4), " here?"),
        user("Which, ", shown(14), " or ", shown(4), "?"),
        user(shown(4), "No place"),
        user("No image"),
        "<|im_start|>system\nLook.<|im_end|>\n<|im_start|>user\nSee" + shown(4) + "<|im_end|>\n"
        "<|im_start|>assistant\n",
    ]
    assert [prompt.context.prompt_text for prompt in prompts.prompts.values()][-1] == "See"
    processor = AutoImageProcessor.from_pretrained(model, backend="pil", local_files_only=True)
    expected = processor([drawn_image(2, 200, 60)])
    loaded = images.process(prompts.prompts[1].images[0])
    np.testing.assert_array_equal(loaded.pixels, expected["pixel_values"])
    assert loaded.image.grid == tuple(expected["image_grid_thw"][0]) == (1, 4, 14)
    # The same image has one hash, wherever it stands.
    alone, beside = prompts.prompts[0].images[0], prompts.prompts[1].images[1]
    assert images.process(alone).image == images.process(beside).image != loaded.image


def test_images_as_hugging_face_keeps_them_in_parquet(model: Path, tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    (tmp_path / "a.png").write_bytes(png(1))
    rows = [
        {"images": [{"bytes": png(1), "path": "gone.png"}, {"bytes": None, "path": "a.png"}]},
        {"images": [{"bytes": png(2), "path": None}]},
    ]
    rows = [{"prompt": "<image>" * len(row["images"]), "ground_truth": "1", **row} for row in rows]
    file = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    prompts, images = load(model, file)
    first, second = prompts.prompts[0].images
    assert images.process(first).image == images.process(second).image
    assert images.process(prompts.prompts[1].images[0]).image != images.process(first).image


def test_parts_that_parquet_fills_in_show_the_template_no_images(model: Path) -> None:
    """Qwen's own template takes a part for an image that has a key of that name."""
    parts = [
        {"type": "text", "text": "How many?", "image": None},
        {"type": "image", "text": None, "image": None},
    ]
    [message] = data_images.with_images([{"role": "user", "content": parts}], 1)
    assert message["content"] == [{"type": "text", "text": "How many?"}, {"type": "image"}]


@pytest.mark.parametrize("mode", ["L", "P", "RGBA", "LA"])
def test_images_without_three_colours_are_made_rgb(model: Path, tmp_path: Path, mode: str) -> None:
    """Where the model's image processor leaves that to others, too."""
    folder = shutil.copytree(model, tmp_path / "model")
    path = folder / "preprocessor_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"do_convert_rgb": False}))
    drawn = drawn_image(1).convert(mode)
    drawn.save(tmp_path / "drawn.png")
    drawn.convert("RGB").save(tmp_path / "rgb.png")
    prompts, images = load(folder, jsonl(tmp_path, {"prompt": "?", "images": ["drawn.png", "rgb.png"]}))
    ours, expected = (images.process(source).pixels for source in prompts.prompts[0].images)
    np.testing.assert_array_equal(ours, expected)


def test_check_shows_an_image_as_one_token_and_says_how_many_there_are(model: Path, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(png(1))
    (tmp_path / "b.png").write_bytes(png(2, 200, 60))
    file = jsonl(tmp_path, {"prompt": "Of <image> or <image>?", "images": ["b.png", "a.png"]})
    data = {
        "train_files": str(file),
        "image_key": "images",
        "prompt_format": "chat",
        "train_batch_size": 1,
    }
    given = config(data=data, model={"path": str(model)}, actor={"ppo_mini_batch_size": 1})
    said = data_checks.training_line(given)
    first = user("Of ", shown(1), " or ", shown(1), "?")
    assert said.endswith(f"; 2 images of at most 14 tokens\n      the first: {first!r}")


def test_large_images_are_made_smaller_and_long_prompts_are_left_out(model: Path, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(png(1, 280, 280))
    file = jsonl(
        tmp_path, {"prompt": "x", "images": "a.png"}, {"prompt": "x" * 99, "images": ["a.png", "a.png"]}
    )
    prompts, images = load(model, file, max_pixels=28 * 28 * 9, max_prompt_length=140)
    assert (len(prompts.prompts), prompts.num_filtered) == (1, 1)
    source = prompts.prompts[0].images[0]
    loaded = images.process(source)
    assert source.num_tokens * 4 == loaded.image.num_patches == 36


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"images": "lost.png"}, r"row 0: image 0 of column 'images': .*lost.png cannot be read .*relative"),
        ({"images": "text.png"}, r"row 0: image 0 of column 'images' cannot be decoded"),
        ({"images": [3]}, r"image 0 of column 'images' is a int; give the path"),
        (
            {"images": ["a.png", "thin.png"]},
            r"image 1 of column 'images' has 2100 x 2 pixels: .*aspect ratio",
        ),
        (
            {"prompt": "<image> <image>", "images": ["a.png"]},
            r"has 2 places for images .* and the row 1 images",
        ),
        ({"prompt": "<image>", "images": []}, r"has 1 places for images .* and the row 0 images"),
        ({"prompt": f"{IMAGE}", "images": ["a.png"]}, r"has 2 image tokens for 1 images"),
        ({"prompt": [{"role": "user", "content": 3}], "images": ["a.png"]}, r"content is a int"),
        (
            {"prompt": [{"role": "user", "content": [{"type": "video"}]}], "images": ["a.png"]},
            r"parts of type video; text and image are known",
        ),
    ],
)
def test_what_is_wrong_with_a_row_is_said(model: Path, tmp_path: Path, row: Any, message: str) -> None:
    (tmp_path / "a.png").write_bytes(png(1))
    (tmp_path / "thin.png").write_bytes(png(1, 2100, 2))
    (tmp_path / "text.png").write_text("no image")
    with pytest.raises(DataError, match=message):
        load(model, jsonl(tmp_path, {"prompt": "x", **row}))


def test_plain_text_and_a_missing_column_are_refused(model: Path, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(png(1))
    file = jsonl(tmp_path, {"prompt": "x", "images": "a.png"})
    with pytest.raises(DataError, match=r"row 0: with data.image_key .* set data.prompt_format: chat"):
        load(model, file, prompt_format="auto")
    with pytest.raises(DataError, match="no column 'pictures'"):
        load(model, file, image_key="pictures")


def test_a_model_that_takes_no_images_is_refused(model: Path, tmp_path: Path) -> None:
    config = DataConfig(train_files=("x.jsonl",), image_key="images")
    assert ImageReader.load(DataConfig(train_files=("x.jsonl",)), tmp_path) is None
    for tree, message in [
        ({"model_type": "qwen2"}, r"\(qwen2\) has no vision tower; take a model of type qwen2_5_vl"),
        ({"model_type": "llava", "vision_config": {}}, r"\(llava\) is not supported with images"),
        ({"model_type": "qwen2_5_vl", "vision_config": {}}, "has no preprocessor_config.json"),
    ]:
        (tmp_path / "config.json").write_text(json.dumps(tree))
        with pytest.raises(ModelError, match=message):
            ImageReader.load(config, tmp_path)


def test_a_file_that_changed_or_is_cut_off_is_noticed_when_its_prompt_is_sent(
    model: Path, tmp_path: Path
) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(png(1))
    file = jsonl(tmp_path, {"prompt": "x", "images": "a.png"})
    prompts, images = load(model, file)
    path.write_bytes(png(2))
    with pytest.raises(DataError, match=r"a.png has changed since the run has read it"):
        images.process(prompts.prompts[0].images[0])
    path.write_bytes(png(1)[:-40])
    prompts, images = load(model, file)
    with pytest.raises(DataError, match=r"a.png cannot be decoded"):
        images.process(prompts.prompts[0].images[0])


def test_an_image_that_cannot_travel_is_refused_when_its_row_is_read(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 16 patches of 1,176 numbers."""
    (tmp_path / "a.png").write_bytes(png(1))
    file = jsonl(tmp_path, {"prompt": "x", "images": "a.png"})
    num_bytes = 4 * 16 * 1176
    monkeypatch.setattr(data_images, "LIMITS", Limits(max_bytes=num_bytes))
    load(model, file)
    monkeypatch.setattr(data_images, "LIMITS", Limits(max_bytes=num_bytes - 1))
    with pytest.raises(DataError, match="image 0 of column 'images' takes 0 MiB .* lower data.max_pixels"):
        load(model, file)


def test_a_prompt_whose_patches_exceed_a_micro_batch_is_refused_before_the_run(
    model: Path, tmp_path: Path
) -> None:
    """By `paceline check` and by the controller; a prompt for validation trains nobody."""
    (tmp_path / "a.png").write_bytes(png(1))
    (tmp_path / "b.png").write_bytes(png(2, 200, 60))
    file = jsonl(tmp_path, {"prompt": "x", "images": "b.png"}, {"prompt": "x", "images": ["a.png", "b.png"]})
    prompts, _ = load(model, file)
    patches = 16 + 56
    needed = len(prompts.prompts[1].token_ids) + patches + 8
    assert [image.num_patches for image in prompts.prompts[1].images] == [16, 56]

    def run(budget: int, **data: object) -> RunConfig:
        rows = {"train_files": [str(file)], "image_key": "images", "prompt_format": "chat"}
        lengths = {"max_prompt_length": 100, "max_response_length": 8, "train_batch_size": 1}
        return config(
            data=rows | lengths | data,
            model={"path": str(model)},
            actor={"ppo_max_token_len_per_gpu": budget, "ppo_mini_batch_size": 1},
        )

    message = (
        f"row 1: .* {patches} patches of images, with a response of 8 tokens, .* to at least {needed}, or"
    )
    for check in (data_checks.training_line, load_inputs):
        check(run(needed))
        with pytest.raises(DataError, match=message):
            check(run(needed - 1))
    short = jsonl(tmp_path / "short", {"prompt": "x", "images": None})
    data_checks.validation_line(run(needed - 1, train_files=[str(short)], val_files=[str(file)]))


def test_a_critic_that_takes_no_images_is_refused_before_the_run(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    sections: dict[str, Any] = {
        "critic": {"path": str(tmp_path)},
        "data": {"train_files": ["x.jsonl"], "image_key": "images"},
        "algorithm": {"adv_estimator": "gae"},
    }
    with pytest.raises(
        ModelError, match=r"critic.path=.* \(qwen2\) takes no images, .* leave critic.path out"
    ):
        model_checks.check_critic_of_images(config(**sections))
    model_checks.check_critic_of_images(config(**sections | {"algorithm": {"adv_estimator": "grpo"}}))
    model_checks.check_critic_of_images(config(**sections | {"data": {"train_files": ["x.jsonl"]}}))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2_5_vl"}))
    model_checks.check_critic_of_images(config(**sections))


@pytest.mark.parametrize(
    "rollout", [{"tools": ["tools.py:add"]}, {"environment": {"address": "127.0.0.1:50071"}}]
)
def test_images_in_conversations_of_several_turns_are_refused(rollout: dict[str, Any]) -> None:
    with pytest.raises(
        ConfigError, match=r"data.image_key is for single answers: leave it out, or rollout.tools"
    ):
        config(data={"train_files": ["x.jsonl"], "image_key": "images"}, rollout=rollout)


def test_a_tower_that_trains_needs_images_and_no_adapters() -> None:
    data = {"train_files": ["x.jsonl"], "image_key": "images"}
    trained = {"path": "m", "vision": {"train": "projector"}}
    assert config(data=data, model=trained).model.vision.train == "projector"
    assert config(data=data).model.vision.train == "none"
    with pytest.raises(
        ConfigError, match=r"model\.vision\.train=projector .* set data\.image_key to the col"
    ):
        config(model=trained)
    with pytest.raises(ConfigError, match=r"model\.vision\.train=projector does not go with model\.lora: .*"):
        config(data=data, model=trained | {"lora": {"rank": 2}})


def test_supervised_tuning_alone_reads_images() -> None:
    pairs = {"train_files": "x.jsonl", "output": "out", "steps": 1}
    tree = {"model": {"path": "m", "vision": {"train": "all"}}, "data": {"image_key": "images"}}
    assert parse(SftRunConfig, tree | {"sft": pairs}).model.vision.train == "all"
    for kind, section in ((RmRunConfig, "rm"), (DpoRunConfig, "dpo")):
        with pytest.raises(ConfigError, match=r"read no images; leave data\.image_key out"):
            parse(kind, tree | {section: pairs})
    with pytest.raises(ConfigError, match=r"model\.vision\.train=all .* there are none; set data\.image_key"):
        parse(SftRunConfig, {"model": tree["model"], "data": {}, "sft": pairs})
