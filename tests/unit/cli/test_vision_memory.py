"""Vision towers and images in the memory plan."""

from __future__ import annotations

import pytest

from paceline.core.errors import ConfigError
from paceline.engines.memory import EngineMemory
from paceline.engines.vllm import VLLM
from paceline.sizing.memory.learner_memory import LearnerMemory
from support.cli_configs import SEVEN
from support.memory_plans import EIGHT_VL, IMAGES, SEVEN_VL, plan_for, run_of, shape_of


@pytest.mark.parametrize("part", ["projector", "all"])
def test_what_trains_of_a_tower_has_averages_gradients_and_activations(part: str) -> None:
    shape = shape_of(SEVEN_VL)
    frozen, trained = (
        LearnerMemory.of(
            run_of(data=IMAGES, model={"path": "m", "dtype": "bfloat16", "vision": {"train": train}}), shape
        )
        for train in ("none", part)
    )
    assert shape.tower is not None
    number = shape.num_in_tower if part == "all" else 5120 * 5121 + 5121 * 3584 + 1280
    assert trained.resident["weights"] == frozen.resident["weights"]
    assert trained.resident["optimizer"] - frozen.resident["optimizer"] == 8 * number // 4
    compact = [plan.changed(compact=True).resident["optimizer"] for plan in (frozen, trained)]
    assert compact[1] - compact[0] == pytest.approx(65 / 32 * number / 4, abs=4)
    summed = [plan.changed(accumulates=True).update["gradients"] for plan in (frozen, trained)]
    assert summed[1] - summed[0] == 4 * number
    parts = [plan.changed(accumulates=False).update["gradients"] for plan in (frozen, trained)]
    assert parts[1] - parts[0] == 4 * number // 4 + 4 * number
    patches = trained.num_tokens * 4 // 5
    kept = [plan.update["activations"] for plan in (frozen, trained)]
    assert kept[1] - kept[0] == shape.tower.kept(patches, 2, part, trained.kept_share) > 0
    lean = shape.tower.kept(patches, 2, "all", 0.0)
    assert lean < shape.tower.kept(patches, 2, "all", 0.5) < shape.tower.kept(patches, 2, "all")


def test_a_vision_tower_is_counted_where_it_is_and_does_not_train_by_default() -> None:
    config = run_of(data=IMAGES)
    text, both = (LearnerMemory.of(config, shape_of(tree)) for tree in (SEVEN, SEVEN_VL))
    tower = shape_of(SEVEN_VL).num_in_tower
    # Float32 shards like the weights around it, gathered as it computes, without averages or gradients.
    assert both.resident["weights"] - text.resident["weights"] == 4 * tower // 4
    assert both.resident["optimizer"] == text.resident["optimizer"]
    for phase in ("scoring", "update"):
        ours, theirs = getattr(both, phase), getattr(text, phase)
        assert ours["gathered"] - theirs["gathered"] == 2 * tower
        assert ours.get("gradients") == theirs.get("gradients")
    adapted = run_of(data=IMAGES, model={"path": "m", "dtype": "bfloat16", "lora": {"rank": 8}})
    text, both = (LearnerMemory.of(adapted, shape_of(tree)) for tree in (SEVEN, SEVEN_VL))
    assert both.resident["weights"] - text.resident["weights"] == 2 * tower // 4
    assert both.update["gradients"] == text.update["gradients"]
    engines = [EngineMemory.of(config, shape_of(tree)) for tree in (SEVEN, SEVEN_VL)]
    assert engines[1].weights - engines[0].weights == 2 * tower
    assert engines[1].rest > engines[0].rest
    assert (
        engines[1].rest
        == EngineMemory.of(run_of(), shape_of(SEVEN_VL)).rest + engines[1].rest - engines[0].rest
    )


def test_an_engine_keeps_the_towers_states_for_decoder_layers_twice() -> None:
    plain = EIGHT_VL | {"vision_config": EIGHT_VL["vision_config"] | {"deepstack_visual_indexes": []}}
    config = run_of(data=IMAGES)
    with_states, without = (EngineMemory.of(config, shape_of(tree)) for tree in (EIGHT_VL, plain))
    tokens = VLLM.prefill_tokens  # more than the longest prompt
    shape = shape_of(EIGHT_VL)
    assert shape.tower is not None
    per_image = 3 * 4096 * 2 // 4 * 4 * tokens  # as the tower computes them
    assert with_states.rest - without.rest == per_image + 2 * 3 * 4096 * 2 * tokens


def test_the_towers_activations_count_where_they_are_more_than_the_layers() -> None:
    small = SEVEN_VL | {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2}
    actor = {"memory": {"recompute": "full"}, "ppo_max_token_len_per_gpu": 65_536}
    shape = shape_of(small)
    with_images, without = (LearnerMemory.of(run_of(data=data, actor=actor), shape) for data in (IMAGES, {}))
    # Four fifths of the budget are patches, the rest their tokens.
    assert shape.tower is not None
    expected = shape.tower.activations(65_536 * 4 // 5, 2)
    assert with_images.update["activations"] == with_images.scoring["activations"] == expected
    assert without.update["activations"] < expected
    # Ranks that share rows have each the images of all of them.
    both = with_images.changed(context=2, num_tokens=32_768)
    assert both.update["activations"] == both.scoring["activations"] == expected
    shared = {"learner": {"world_size": 8, "context_parallel": 2}}
    assert LearnerMemory.of(run_of(data=IMAGES, **shared), shape).context == 2
    large = LearnerMemory.of(run_of(data=IMAGES), shape_of(SEVEN_VL))
    assert large.update["activations"] == LearnerMemory.of(run_of(), shape_of(SEVEN)).update["activations"]


def test_the_least_budget_that_the_plan_advises_holds_a_row_with_its_images() -> None:
    config = run_of(data=IMAGES)
    with pytest.raises(ConfigError, match=f"ppo_max_token_len_per_gpu: {512 + 1024 + 4 * 512}"):
        plan_for(config, SEVEN_VL, gib=47).lines()
