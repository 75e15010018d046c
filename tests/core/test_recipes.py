"""Recipes: composition, overrides, and the resolved dump that reads back as itself."""

import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cadenza.core.errors import ConfigError
from cadenza.core.recipes import apply_override, load_recipe, merge_tables, parse_value, to_toml


@pytest.fixture
def recipes(tmp_path):
    """Writes recipes by name and gives the folder."""

    def write(**texts):
        for name, text in texts.items():
            (tmp_path / f"{name}.toml").write_text(text)
        return [tmp_path]

    return write


BASE = '[[stage]]\nname = "tasks"\ncount = 10\n[stage.mix]\nhard = 1\n[[stage]]\nname = "sft"\nsteps = 5\n'


def test_a_child_changes_only_the_keys_it_names(recipes):
    folders = recipes(base=BASE, demo='extends = "base"\nseed = 3\n[[stage]]\nname = "tasks"\nmix.easy = 2\n')
    table = load_recipe("demo", folders)
    assert table == {
        "name": "demo",
        "seed": 3,
        "stage": [
            {"name": "tasks", "count": 10, "mix": {"hard": 1, "easy": 2}},
            {"name": "sft", "steps": 5},
        ],
    }


def test_a_new_stage_is_appended_and_order_picks(recipes):
    folders = recipes(
        base=BASE,
        demo='extends = "base"\norder = ["rl", "tasks"]\n[[stage]]\nname = "rl"\n',
        bad='extends = "base"\norder = ["sfd"]',
    )
    assert [stage["name"] for stage in load_recipe("demo", folders)["stage"]] == ["rl", "tasks"]
    with pytest.raises(ConfigError, match="did you mean 'sft'"):
        load_recipe("bad", folders)


def test_a_recipe_of_the_user_may_extend_the_shipped_one_of_the_same_name(tmp_path):
    own, shipped = tmp_path / "own", tmp_path / "shipped"
    own.mkdir()
    shipped.mkdir()
    (own / "demo.toml").write_text('extends = "demo"\nseed = 1\n')
    (shipped / "demo.toml").write_text("seed = 0\nneeds_disk_gb = 2\n")
    assert load_recipe("demo", [own, shipped]) == {"seed": 1, "needs_disk_gb": 2, "name": "demo", "stage": []}


LIKE = 'order = ["slow"]\n[[stage]]\nname = "slow"\nlike = "fast"\nwait = 2\nmix.hard = 3\n'
FAST = '[[stage]]\nname = "fast"\nkind = "k:K"\nsteps = 5\nmix = { easy = 1, hard = 1 }\n'


def test_a_stage_like_another_differs_only_in_its_own_keys_whichever_recipe_sets_the_others(recipes):
    folders = recipes(parent=FAST, child='extends = "parent"\n' + LIKE)
    copied = {"name": "slow", "kind": "k:K", "steps": 5, "mix": {"easy": 1, "hard": 3}, "wait": 2}
    assert load_recipe("child", folders)["stage"] == [copied]
    other = load_recipe("child", folders, ["fast.inputs={model='a', data='b'}", "slow.inputs={model='c'}"])[
        "stage"
    ]
    assert other == [{**copied, "inputs": {"model": "c"}}]
    sets = ["slow.inputs.data=d", "fast.inputs={model='a', data='b', more='m'}", "slow.inputs.more=n"]
    one_role = load_recipe("child", folders, sets)["stage"]
    assert one_role == [{**copied, "inputs": {"model": "a", "data": "d", "more": "n"}}]
    whole = load_recipe("child", folders, [*sets, "slow.inputs={model='c'}", "slow.inputs.data=e"])["stage"]
    assert whole == [{**copied, "inputs": {"model": "c", "data": "e"}}]
    changed = load_recipe("child", folders, ["fast.steps=9", "fast.wait=1", "slow.mix.easy=0"])["stage"]
    assert changed == [{**copied, "steps": 9, "mix": {"easy": 0, "hard": 3}}]


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ({"a": 3}, r"key 'a\.like' = 3 is not a text"),
        ({"first": "secnd", "second": None}, "did you mean 'second'"),
        ({"a": "a"}, "in a circle: a -> a"),
        ({"a": "b", "b": "c", "c": "b"}, "in a circle: a -> b -> c -> b"),
    ],
)
def test_a_stage_like_no_other_is_refused_in_one_line(recipes, stages, message):
    tables = [{"name": name, **({} if like is None else {"like": like})} for name, like in stages.items()]
    with pytest.raises(ConfigError, match=message) as failure:
        load_recipe("r", recipes(r=to_toml({"stage": tables})))
    assert "\n" not in str(failure.value)


def test_a_circle_of_extends_is_named(recipes):
    folders = recipes(a='extends = "b"', b='extends = "a"')
    with pytest.raises(ConfigError, match=r"in a circle: a -> b -> a"):
        load_recipe("a", folders)
    with pytest.raises(ConfigError, match=r"recipe .*c\.toml extends itself; name another"):
        load_recipe("c", recipes(c='extends = "c"'))


def test_a_path_in_extends_means_another_file_in_another_working_folder(tmp_path, monkeypatch):
    (tmp_path / "mine" / "parts").mkdir(parents=True)
    (tmp_path / "mine" / "child.toml").write_text('extends = "./parts/parent.toml"\n')
    (tmp_path / "mine" / "parts" / "parent.toml").write_text('extends = "../oldest.toml"\nfrom = "parent"\n')
    (tmp_path / "mine" / "oldest.toml").write_text('oldest = "beside"\n')
    (tmp_path / "oldest.toml").write_text('oldest = "of the working folder"\n')
    for folder, name in (
        ("mine", "./child.toml"),
        ("", "mine/child.toml"),
        ("", str(tmp_path / "mine/child.toml")),
    ):
        monkeypatch.chdir(tmp_path / folder)
        table = load_recipe(name, [])
        assert (table["name"], table["from"], table["oldest"]) == ("child", "parent", "beside")
    (tmp_path / "mine" / "absolute.toml").write_text(f'extends = "{tmp_path}/oldest.toml"\n')
    assert load_recipe("mine/absolute.toml", [])["oldest"] == "of the working folder"
    (tmp_path / "mine" / "child.toml").write_text('extends = "./none"\n')
    with pytest.raises(
        ConfigError, match=r"no recipe file mine/none, which mine/child\.toml extends; check the path"
    ):
        load_recipe("mine/child.toml", [])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name = ", "is not TOML"),
        ("[stage]\nname = 'x'", "not an array of tables"),
        ("[[stage]]\nkind = 'x'", "stage 1 .* has no usable name"),
        ("[[stage]]\nname = 'a.b'", "stage 1 .* has no usable name"),
        ("[[stage]]\nname = 'x'\n[[stage]]\nname = 'x'", "two stages"),
        ("extends = 3", "extends in .* is not a text"),
        ("order = 3", "order is not a list"),
    ],
)
def test_a_broken_recipe_is_refused_in_one_line(recipes, text, message):
    folders = recipes(broken=text)
    with pytest.raises(ConfigError, match=message) as failure:
        load_recipe("broken", folders)
    assert "\n" not in str(failure.value)


def test_unknown_recipe_names_the_nearest(recipes):
    folders = recipes(demo="", base="")
    with pytest.raises(ConfigError, match="unknown recipe 'dmo'; did you mean 'demo'"):
        load_recipe("dmo", folders)
    with pytest.raises(ConfigError, match="cadenza train --list"):
        load_recipe("./nowhere.toml", folders)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3", 3),
        ("1e-3", 1e-3),
        ("true", True),
        ("[1, 2]", [1, 2]),
        ("{a = 1}", {"a": 1}),
        ('"3"', "3"),
        ("fast", "fast"),
        ("runs/a/b", "runs/a/b"),
        ("", ""),
        ("1\nother = 2", "1\nother = 2"),
    ],
)
def test_override_values_are_toml_and_bare_words_are_texts(text, value):
    assert parse_value(text) == value


@pytest.mark.parametrize("text", ["rl", "rl.steps", "=3", "rl..steps=3", ".a=1"])
def test_malformed_override_shows_the_form(text):
    with pytest.raises(ConfigError, match=r"is not KEY=VALUE"):
        apply_override({"stage": []}, text)


def test_override_of_an_unknown_stage_names_the_nearest():
    with pytest.raises(ConfigError, match=r"unknown key 'sfd\.steps'; did you mean 'sft'"):
        apply_override({"stage": [{"name": "sft"}]}, "sfd.steps=3")


def test_override_below_a_plain_value_is_refused():
    with pytest.raises(ConfigError, match="is a value, not a table"):
        apply_override({"stage": [{"name": "sft", "steps": 3}]}, "sft.steps.more=3")


def test_overrides_reach_nested_tables_and_the_recipe_itself():
    table = {"seed": 0, "stage": [{"name": "sft", "optimizer": {"rate": 1.0}}]}
    for text in ("sft.optimizer.rate=0.1", "sft.mix.hard=2", "seed=7"):
        apply_override(table, text)
    assert table == {"seed": 7, "stage": [{"name": "sft", "optimizer": {"rate": 0.1}, "mix": {"hard": 2}}]}


@pytest.mark.parametrize("text", ["9" * 5000, "[" * 5000])
def test_a_value_that_python_will_not_read_is_a_defect(tmp_path, text):
    assert parse_value(text) == text  # refused where its key is known, as any text in place of a number
    (tmp_path / "r.toml").write_text(f"seed = {text}\n")
    with pytest.raises(ConfigError, match="is not TOML|nested too deep"):
        load_recipe("r", [tmp_path])


names = st.text(string.ascii_lowercase + "_-", min_size=1, max_size=6)
scalars = st.one_of(
    st.booleans(),
    st.integers(-(2**53), 2**53),
    st.floats(allow_nan=False),
    st.text(max_size=12),
    st.lists(st.integers()),
)
values = st.recursive(scalars, lambda inner: st.dictionaries(names, inner, max_size=3), max_leaves=6)
tables = st.dictionaries(
    names.filter(lambda n: n not in ("stage", "name", "extends", "order", "like")), values, max_size=4
)


@pytest.mark.parametrize(
    "override",
    [
        "stage=3",
        "stage=[{}]",
        "stage=[3]",
        "order=[['a']]",
        "a.name=3",
        "a.name='../x'",
        "a.name='b'",
        "a.name=''",
    ],
)
def test_an_override_that_leaves_no_stages_ends_in_a_stack_trace_or_outside_the_run(tmp_path, override):
    path = tmp_path / "r.toml"
    path.write_text('name = "r"\n[[stage]]\nname = "a"\n[[stage]]\nname = "b"\n', encoding="utf-8")
    with pytest.raises(ConfigError):
        load_recipe(str(path), [], [override])


@given(tables, st.lists(tables, max_size=3))
def test_what_a_dry_run_prints_reads_back_as_the_same_recipe(tmp_path_factory, top, stages):
    table = {"name": "r", **top, "stage": [{"name": f"s{i}", **stage} for i, stage in enumerate(stages)]}
    path = tmp_path_factory.mktemp("recipes") / "r.toml"
    path.write_text(to_toml(table), encoding="utf-8")
    assert load_recipe(str(path), []) == table


@given(tables, tables)
def test_merging_leaves_its_arguments_alone_and_the_child_wins(parent, child):
    before = repr((parent, child))
    merged = merge_tables(parent, child)
    assert repr((parent, child)) == before
    assert set(merged) == {*parent, *child}
    assert merge_tables(merged, child) == merged
