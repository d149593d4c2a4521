"""`device.fallback` in a profile: one word, or a word per op."""

import pytest

import torchrepro

PER_OP = """
device:
  fallback:
    ops:
      cumsum: native
      aten::put_: cpu
      upsample_*: error
"""
OPS = {"cumsum": "native", "aten::put_": "cpu", "upsample_*": "error"}


def test_a_mapping_is_one_value(load_text):
    """A mapping of ops is one value, kept as written: its keys are no keys of a profile."""
    loaded = load_text(PER_OP)

    assert loaded.device.fallback == {"ops": OPS}
    assert loaded.resolved.values["device"] == {"fallback": {"ops": OPS}}
    assert [(knob.name, value) for knob, value in loaded.resolved.settings()] == [
        ("device.fallback", {"ops": OPS})
    ]


def test_an_override_replaces_the_word_and_adds_to_a_mapping(load_text):
    """An override, of the whole or of one op, has the effect of the same line in a file."""
    whole = torchrepro.load("debug-strict", ["device.fallback={ops:{cumsum:native}}"])
    dotted = torchrepro.load("debug-strict", ["device.fallback.ops.cumsum=native"])
    added = load_text(PER_OP, "device.fallback.ops.median=cpu")
    word = load_text(PER_OP, "device.fallback=cpu")

    assert whole == dotted
    assert whole.device.fallback == {"ops": {"cumsum": "native"}}
    assert added.device.fallback == {"ops": {**OPS, "median": "cpu"}}
    assert word.device.fallback == "cpu"


def test_a_null_leaves_an_op_alone(load_text):
    """A null op, and a fallback without any decision, have no effect."""
    loaded = load_text(PER_OP, "device.fallback.ops.cumsum=null")
    empty = load_text("device: {fallback: {ops: {cumsum: null}}}")

    assert "cumsum" not in loaded.device.fallback["ops"]
    assert empty.resolved.settings() == []


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("device:\n  fallback: cup\n", "bad.yaml:2: device.fallback = cup: not a legal value"),
        ("device:\n  fallback: cup\n", "did you mean: cpu"),
        (PER_OP.replace("native", "natif"), "bad.yaml:5: device.fallback.ops.cumsum = natif"),
        (PER_OP.replace("native", "natif"), "did you mean: native"),
        (PER_OP.replace("native", "true"), "device.fallback.ops.cumsum = true"),
        (PER_OP.replace("ops:", "op:"), "device.fallback.op = a section: unknown key"),
        ("device: {fallback: {ops: cpu}}", "device.fallback.ops = cpu: not a mapping"),
        ("device: {fallback: [cpu]}", "device.fallback = a list"),
        ("device: {fallback: native}", "legal: error, cpu, or per op as in {ops: {cumsum: cpu}}"),
    ],
)
def test_another_value_is_refused_with_its_line(refusal, text, says):
    """The refusal of a wrong word has its line, the legal words and a near match."""
    assert says in refusal(text)


@pytest.mark.parametrize("algorithms", ["none", "warn"])
@pytest.mark.parametrize("fallback", ["cpu", "{ops: {'*': cpu}}"])
def test_a_fallback_is_a_contradiction_if_no_op_is_refused(refusal, algorithms, fallback):
    """With deterministic algorithms that never raise, a fallback for refused ops is an error."""
    flags = f"backends: {{torch: {{deterministic_algorithms: {algorithms}}}}}"

    assert "no op raises" in refusal(f"{flags}\ndevice: {{fallback: {fallback}}}\n")


@pytest.mark.parametrize("fallback", ["error", "{ops: {cumsum: cpu}}", "{ops: {cumsum: native}}"])
def test_a_fallback_that_needs_no_refusal_is_no_contradiction(load_text, fallback):
    """`error` is torch's own reaction, and an op decided by name needs no refusal."""
    flags = "backends: {torch: {deterministic_algorithms: none}}"

    assert load_text(f"{flags}\ndevice: {{fallback: {fallback}}}\n").device.fallback
