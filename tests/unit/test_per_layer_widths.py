"""head_dim and num_kv_heads that differ between layers: how they are written, what is refused, what follows."""

import json
from decimal import ROUND_HALF_UP, Decimal

import pytest
import yaml

from megatron.errors import ConfigError
from megatron.geometry import HeadGeometry
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.command_line import decode, encode
from megatron.neox_arguments.loading import ConfigLoader
from megatron.neox_arguments.per_layer import layers_text
from tests.helpers.configs import tiny_args, tiny_values

HEADS = dict(hidden_size=80, num_attention_heads=6, num_kv_heads=2)


def widths(**settings):
    args = tiny_args(**{**HEADS, **settings})
    return [args.head_geometry(number).head_dim for number in range(args.num_layers)]


def problems(**settings):
    with pytest.raises(ConfigError) as error:
        tiny_args(**{**HEADS, **settings})
    return error.value.problems


@pytest.mark.parametrize(
    "written, layers, read",
    [
        ([[24, 2], [40, 3]], 5, [24, 24, 40, 40, 40]),
        ([[24, "all"]], 3, [24, 24, 24]),
        ([[[24, 24, 40], "all"]], 7, [24, 24, 40, 24, 24, 40, 24]),
        ([[[24, 40], 2], [16, 1]], 5, [24, 40, 24, 40, 16]),
        ([24, 40, 16], 3, [24, 40, 16]),
    ],
)
def test_runs_patterns_and_lists(written, layers, read):
    assert widths(head_dim=written, num_layers=layers) == read
    assert widths(head_dim=yaml.load(str(written), ConfigLoader), num_layers=layers) == read


@pytest.mark.parametrize("base, exponent, multiple", [(64, 0.3, 8), (20, -0.5, 2), (33.5, 0.0, 4), (12, 1, 8)])
def test_schedule(base, exponent, multiple):
    """The formula in decimal arithmetic. 12 x 1 and 12 x 3 of eights are halfway, and go up."""
    schedule = dict(schedule="progressive", base=base, exponent=exponent, multiple_of=multiple)
    truth = []
    for layer in range(9):
        units = Decimal(str(base)) * Decimal(layer + 1) ** Decimal(str(exponent)) / multiple
        truth.append(max(1, int(units.quantize(Decimal(1), ROUND_HALF_UP))) * multiple)
    assert widths(head_dim=schedule, num_layers=9) == truth


def test_a_schedule_is_one_multiple_wide_at_least():
    schedule = dict(schedule="progressive", base=9, exponent=-2, multiple_of=8)
    assert widths(head_dim=schedule, num_layers=4) == [8, 8, 8, 8]


def test_everything_follows_from_the_layers_own_numbers():
    args = tiny_args(**{**HEADS, "num_kv_heads": [[2, 1], [6, 2]]}, num_layers=3, head_dim=[[24, 2], [40, 1]])
    wanted = [HeadGeometry(80, 6, 2, 24, 24), HeadGeometry(80, 6, 6, 24, 24), HeadGeometry(80, 6, 6, 40, 40)]
    assert [args.head_geometry(number) for number in range(3)] == wanted
    assert args.layers_by_geometry() == {wanted[0]: [0], wanted[1]: [1], wanted[2]: [2]}
    assert [args.attention_scale(number) for number in range(3)] == [24**-0.5, 24**-0.5, 40**-0.5]
    assert [args.layer_attention(number).rotary.ndims for number in range(3)] == [24, 24, 40]
    assert not args.has_uniform_heads
    for ask in (args.head_geometry, args.attention_scale):
        with pytest.raises(ConfigError, match=r"head_dim=\[\[24, 2\], \[40, 1\]\].*head_dim 40 with 6.*in layer 2"):
            ask()
    assert args.update(softmax_scale=0.25).attention_scale(2) == 0.25


@pytest.mark.parametrize("written", [[[24, 2]], [24, 24], [[[24], "all"]]])
def test_equal_layers_are_those_of_one_number(written):
    runs, number = (tiny_args(**{**HEADS, "head_dim": width}) for width in (written, 24))
    assert runs.has_uniform_heads and runs.head_geometry() == number.head_geometry()
    assert [runs.layer_attention(layer) for layer in (0, 1)] == [number.layer_attention(layer) for layer in (0, 1)]


@pytest.mark.parametrize(
    "head_dim",
    [[[24, 1], [40, 1]], [24, 40], {"schedule": "progressive", "base": 16, "exponent": 0.5, "multiple_of": 4}],
)
def test_the_setting_stays_as_written_on_its_way(head_dim):
    args = tiny_args(**{**HEADS, "num_kv_heads": [[2, 1], [3, 1]]}, head_dim=head_dim)
    assert args.head_dim == head_dim and args.num_kv_heads == [[2, 1], [3, 1]]
    by_json = NeoXArgs.from_dict(decode(encode(args.given())))
    by_yaml = NeoXArgs.from_dict(yaml.load(yaml.safe_dump(args.non_default()), ConfigLoader))
    for other in (by_json, by_yaml, args.update(seed=args.seed)):
        assert other.layers_by_geometry() == args.layers_by_geometry() and other.head_dim == head_dim
    assert json.loads(json.dumps(args.non_default()))["head_dim"] == head_dim


FAULTS = [
    (dict(head_dim=[24]), "head_dim describes 1 layer and num_layers=3"),
    (dict(head_dim=[[24, 2]]), "head_dim describes 2 layers and num_layers=3"),
    (dict(head_dim=[[24, 2], [40, "all"]]), "head_dim describes 5 layers and num_layers=3"),
    (dict(head_dim=[]), "head_dim describes 0 layers"),
    (dict(num_kv_heads=[2, 2]), "num_kv_heads describes 2 layers"),
    (dict(head_dim=[24, 24, 0]), "head_dim holds 0, which is not a positive whole number"),
    (dict(head_dim=[24, 24, True]), "head_dim holds True"),
    (dict(head_dim=[24, 24, None]), "head_dim holds None"),
    (dict(head_dim=[[24, True]]), "head_dim holds [24, True]"),
    (dict(head_dim=[[24.0, 3]]), "head_dim holds 24.0"),
    (dict(head_dim=[[[], 3]]), "head_dim holds [[], 3]"),
    (dict(num_kv_heads=[[-2, 3]]), "num_kv_heads holds -2"),
    (dict(num_kv_heads={"a": 1}, head_dim=24), "num_kv_heads={'a': 1} must be a whole number or a list"),
    (dict(head_dim=True), "head_dim=True must be a whole number"),
    (dict(head_dim={}), "schedule, base, exponent, multiple_of is missing"),
]
SCHEDULE = dict(schedule="progressive", base=64, exponent=0.3, multiple_of=8)
FAULTS += [
    (dict(head_dim={**SCHEDULE, "power": 1}), "power is not one of its keys; write {schedule: progressive"),
    (dict(head_dim={**SCHEDULE, "schedule": "linear"}), "head_dim.schedule='linear' is not known"),
    (dict(head_dim={**SCHEDULE, "base": 0}), "head_dim.base=0 must be"),
    (dict(head_dim={**SCHEDULE, "base": True}), "head_dim.base=True must be"),
    (dict(head_dim={**SCHEDULE, "exponent": float("nan")}), "head_dim.exponent=nan must be"),
    (dict(head_dim={**SCHEDULE, "exponent": 1e6}), "head_dim.exponent=1000000.0 must be"),
    (dict(head_dim={**SCHEDULE, "multiple_of": 0.5}), "head_dim.multiple_of=0.5 must be"),
]


@pytest.mark.parametrize("settings, message", FAULTS)
def test_faults(settings, message):
    found = problems(num_layers=3, **settings)
    assert len(found) == 1 and message in found[0], found


def test_all_problems_at_once_with_their_layers():
    found = problems(num_layers=12, head_dim=[[24, 4], [25, 8]], num_kv_heads=[[4, 1], [2, 11]], model_parallel_size=4)
    assert any(problem.startswith("layers 4-11: rotary_pct=1.0 of head_dim=25") for problem in found), found
    assert any(problem.startswith("layer 0: num_attention_heads=6 is not a multiple of num_kv") for problem in found)
    found = problems(num_layers=3, head_dim=[24, 24], num_kv_heads=[2, 0, 2])
    assert len(found) == 2 and "head_dim describes" in found[0] and "num_kv_heads holds 0" in found[1]
    assert all("layer" not in problem for problem in problems(num_layers=3, head_dim=[[25, 3]]))


def test_layers_that_cannot_be_split_are_named():
    kv_heads = [[6, 1], [3, 1], [2, 1]]
    found = problems(num_layers=3, head_dim=24, num_kv_heads=kv_heads, model_parallel_size=2)
    assert found == [found[0]] and found[0].startswith("layer 1: num_kv_heads=3 does not divide by")


def test_scalings_are_checked_for_the_widths_of_their_layers():
    factors = dict(rope_type="longrope", short_factor=[1.0] * 12, long_factor=[2.0] * 12)
    scaling = {**factors, "original_max_position_embeddings": 16}
    settings = dict(**HEADS, head_dim=[24, 40], rope_scaling=scaling)
    assert any("longrope" in problem or "short_factor" in problem for problem in problems(**settings))
    by_type = {"sliding_attention": scaling}
    types = dict(layer_types=["sliding_attention", "full_attention"], sliding_window_width=8)
    args = tiny_args(**{**settings, "rope_scaling": by_type}, **types)
    assert args.layer_attention(0).rotary.scaling is not None and args.layer_attention(1).rotary.scaling is None


def test_missing_layers_are_one_problem():
    values = {**tiny_values(**HEADS), "head_dim": [[24, 2]]}
    del values["num_layers"]
    with pytest.raises(ConfigError) as error:
        NeoXArgs.from_dict(values)
    assert error.value.problems == ["num_layers is not set; it has no default"]


def test_numbers_of_layers_in_words():
    assert [layers_text(each) for each in ([3], [0, 1, 2], [0, 2, 3, 7])] == [
        "layer 3",
        "layers 0-2",
        "layers 0, 2-3, 7",
    ]


GROUPED = {"layer": 1, "groups": [[16, 4], [40, 2]]}


def test_groups_of_heads():
    args = tiny_args(**{**HEADS, "num_kv_heads": 3}, num_layers=4, head_dim=[[24, 4], GROUPED], rotary_pct=0.5)
    narrow, wide = HeadGeometry(80, 4, 2, 16, 8), HeadGeometry(80, 2, 1, 40, 20)
    mixed = args.head_geometry(1)
    assert mixed.groups == (narrow, wide) and args.head_geometry(3).groups == (args.head_geometry(3),)
    assert (mixed.num_attention_heads, mixed.num_kv_heads, mixed.hidden_size) == (6, 3, 80)
    assert (mixed.query_hidden_size, mixed.kv_hidden_size, mixed.qkv_hidden_size) == (64 + 80, 32 + 40, 144 + 2 * 72)
    assert [args.attention_scale(1, group) for group in (0, 1)] == [16**-0.5, 40**-0.5]
    assert [args.layer_attention(1, group).rotary.ndims for group in (0, 1)] == [8, 20]
    assert args.layers_by_geometry() == {args.head_geometry(0): [0, 2, 3], mixed: [1]}
    with pytest.raises(ConfigError, match="head_dim 16 with 2 kv heads and head_dim 40 with 1 kv heads in layer 1"):
        args.head_geometry()
    for name in ("head_dim", "rotary_ndims", "default_softmax_scale", "qkv_layout"):
        assert not hasattr(mixed, name), "one number for several widths"


def test_groups_of_all_layers_and_of_one_kind_of_layer():
    pairs = dict(num_layers=2, num_kv_heads=2)
    args = tiny_args(
        **{**HEADS, **pairs}, head_dim=[[24, 2], {**GROUPED, "layer": [0, 1], "groups": [[16, 3], [40, 3]]}]
    )
    assert len(args.layers_by_geometry()) == 1 and not args.has_uniform_heads
    own = tiny_args(**{**HEADS, **pairs}, head_dim=[[24, 2], {"layer": 0, "groups": [[16, 2, 1], [40, 4, 4]]}])
    assert [group.num_kv_heads for group in own.head_geometry(0).groups] == [1, 4], "instead of the layer's 2"
    alone = tiny_args(**{**HEADS, **pairs}, head_dim=[[24, 2], {"layer": 0, "groups": [[40, 6]]}])
    assert alone.head_geometry(0) == HeadGeometry(80, 6, 2, 40, 40)


def test_the_ranks_share_of_groups():
    args = tiny_args(**{**HEADS, "num_kv_heads": 3}, num_layers=2, head_dim=[[24, 2], GROUPED])
    share = args.head_geometry(1).shard(2)
    assert [(group.num_attention_heads, group.num_kv_heads) for group in share.groups] == [(2, 1), (1, 1)]
    with pytest.raises(ConfigError, match="group of head_dim 40: num_attention_heads=2 does not divide by"):
        args.head_geometry(1).shard(4)


WRONG_GROUPS = [
    (dict(groups=[[16, 4], [40, 1]]), "layer 1: its groups have 5 query heads in all, and num_attention_heads=6"),
    (dict(groups=[[16, 1], [40, 5]]), "layer 1: group of 1 heads of 16: num_attention_heads=6 to num_kv_heads=2 makes"),
    (dict(groups=[[16, 3, 2], [40, 3]]), "group of 3 heads of 16: num_attention_heads=3 is not a multiple of num_kv"),
    (dict(groups=[[16, 3], [41, 3]]), "group of 3 heads of 41: rotary_pct=1.0 of head_dim=41 rotates 41"),
    (dict(groups=[[16, 3], [40]]), "groups: [[16, 3], [40]], which must be a list of [width, query heads]"),
    (dict(groups=[[16, True], [40, 3]]), "which must be a list of [width, query heads]"),
    (dict(groups=[]), "groups: [], which must be"),
    (dict(groups={"16": 3}), "which must be a list"),
    (dict(layer=2), "layer: 2, which must be the number of a layer, from 0 to 1"),
    (dict(layer=True), "layer: True, which must be"),
    (dict(layer=[]), "layer: [], which must be"),
    (dict(layer=[1, 1]), "layer 1 is given groups twice"),
    (dict(heads=3), "an item for a layer with heads of several widths is written {layer: 4, groups:"),
]


@pytest.mark.parametrize("change, message", WRONG_GROUPS)
def test_faults_of_groups(change, message):
    item = {"layer": 1, "groups": [[16, 3], [40, 3]], **change}
    found = problems(num_layers=2, head_dim=[[24, 2], item])
    assert any(message in problem for problem in found), found


def test_what_heads_of_several_widths_do_not_go_with():
    settings = dict(**HEADS, head_dim=[[24, 2], {"layer": 1, "groups": [[16, 4], [40, 2]]}], num_layers=2)
    settings["num_kv_heads"] = 6
    for switch in ("te_mha", "te_fp8_mha"):
        (found,) = [text for text in problems(**settings, **{switch: True}) if "several" in text]
        assert "gives layer 1 heads of several widths" in found and "set te_mha: false" in found
    assert any(
        "several" in text or "in groups" in text for text in problems(**settings, pos_emb="rpe", model_parallel_size=2)
    )
    assert tiny_args(**settings, pos_emb="rpe").head_geometry(1).groups[1].head_dim == 40
    only_numbers = problems(num_layers=2, head_dim=24, num_kv_heads=[2, {"layer": 1, "groups": [[16, 6]]}])
    assert any("num_kv_heads holds {'layer'" in text for text in only_numbers)
