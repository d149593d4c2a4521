"""`torchrepro.log_to` writes to the real tools, offline, and its refusals say what to do."""

import json
import sys

import pytest

import torchrepro

pytest_plugins = ("pytester",)

TIMEOUT = 600
PLANTED = "sk-planted-0123456789"
TOOLS = """
import json, os, pathlib, sys, time
folder = pathlib.Path.cwd()
os.environ.update(
    MLFLOW_ALLOW_FILE_STORE="1", WANDB_MODE="offline", WANDB_SILENT="true", MY_TOKEN=sys.argv[2],
    WANDB_X_SERVICE_WAIT="300", WANDB_INIT_TIMEOUT="300",
)
import mlflow, tensorboardX, torch, torchrepro, wandb
from torch.utils.tensorboard import SummaryWriter
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

def tags(run):
    all_tags = mlflow.MlflowClient().get_run(run.info.run_id).data.tags
    return {key: text for key, text in all_tags.items() if key.startswith("torchrepro.")}

def artifact(run):
    return json.loads(mlflow.artifacts.load_text(f"{run.info.artifact_uri}/repro.json"))

def refused(*targets):
    try:
        return torchrepro.log_to(*targets).places
    except torchrepro.TorchreproError as error:
        return str(error)

def board(folder):
    texts, hparams = EventAccumulator(folder), EventAccumulator(f"{folder}/torchrepro")
    texts.Reload(), hparams.Reload()
    raw = hparams.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    hyperparameters = HParamsPluginData.FromString(raw).session_start_info.hparams
    events = texts.Tensors("torchrepro/manifest/text_summary")
    return {
        "digest": hyperparameters["torchrepro.digest"].string_value,
        "seed": hyperparameters["torchrepro.seed"].number_value,
        "steps": [event.step for event in events],
        "manifest": json.loads(events[-1].tensor_proto.string_val[0]),
    }

def written(text):
    "Whether wandb has written a text, possibly a moment after the end of a run."
    (path,) = folder.glob("wandb/offline*/*.wandb")
    until = time.monotonic() + 300
    while time.monotonic() < until:
        data = path.read_bytes()
        # A text may be split over two blocks of 32 KiB, each with a header of 7 bytes.
        blocks = (data[start + 7 : start + (1 << 15)] for start in range(0, len(data), 1 << 15))
        if text.encode() in b"".join(blocks):
            return True
        time.sleep(0.05)
    return False

mlflow.set_tracking_uri(f"file:{folder}/mlruns")
run = wandb.init(dir=folder)
writers = SummaryWriter("tb"), tensorboardX.SummaryWriter("tbx")
facts = {}
secret = f"env_extra.ACME_NOTE={sys.argv[2]}"
with torchrepro.apply("seed-only", ["seed=7", "env_extra.ACME_SHARDS='4'", secret]) as applied:
    with mlflow.start_run() as logged:
        facts["automatic"] = tags(logged)
        torchrepro.log_to()
        facts["first"] = {"digest": applied.digest, "tags": tags(logged)}
        facts["earlier"] = artifact(logged), dict(run.config)
with torchrepro.apply("seed-only", ["dropout=zero"]) as applied:
    with torchrepro.log_to(logged, wandb, *writers) as log:
        torch.manual_seed(5)
    facts["second"] = {"digest": applied.digest, "tags": tags(logged)}
    facts["places"] = log.places
    facts["manifest"] = artifact(logged)
    facts["config"] = run.config["torchrepro"]
    facts["file"] = json.loads((pathlib.Path(run.dir) / "repro.json").read_text())
    [writer.close() for writer in writers]
    facts["boards"] = [board("tb"), board("tbx")]
    facts["inactive"] = refused("mlflow")
    run.finish()
    facts["finished"] = refused(run, "folder/")
facts["synced"] = written(applied.digest)
print(json.dumps(facts))
"""
HYDRA_APP = """
import hydra, sys, torchrepro

@hydra.main(version_base=None)
def main(config):
    with torchrepro.apply("seed-only"):
        print(torchrepro.log_to())
    print({"mlflow", "wandb", "tensorboard"} & set(sys.modules))

main()
"""


@pytest.fixture
def under_seed_only():
    """Apply a profile, for tests that need no tool."""
    with torchrepro.apply("seed-only") as applied:
        yield applied


@pytest.mark.slow
def test_every_tool_gets_digest_values_and_manifest(pytester):
    """Each tool stores the active profile, and a second call replaces the first.

    The end of the block logs what the run did in between. No secret is logged, neither of the
    profile nor of a variable or an argument.
    """
    script = pytester.makepyfile(TOOLS)

    done = pytester.run(sys.executable, script, "--api-key", PLANTED, timeout=TIMEOUT)

    assert done.ret == 0, done.stderr.str()
    facts = json.loads(done.outlines[-1])
    first, second, digest = facts["first"], facts["second"], facts["second"]["digest"]
    assert facts["automatic"]["torchrepro.digest"] == first["digest"]
    assert first["tags"]["torchrepro.seed"] == "7"
    assert first["tags"]["torchrepro.env_extra.ACME_SHARDS"] == "4"
    assert first["tags"]["torchrepro.env_extra.ACME_NOTE"] == "(hidden)"
    assert second["tags"]["torchrepro.digest"] == digest
    assert second["tags"]["torchrepro.guarantee"] == "seeded"
    assert second["tags"]["torchrepro.dropout"] == "zero"
    assert "torchrepro.env_extra.ACME_SHARDS" not in second["tags"], "of the first profile"
    assert facts["config"]["digest"] == digest
    assert facts["config"]["dropout"] == "zero"
    assert facts["synced"]
    assert [place.partition(":")[0] for place in facts["places"]] == [
        *("mlflow", "wandb", "tensorboard", "tensorboard"),
    ]
    manifests = [facts["manifest"], facts["file"], *(b.pop("manifest") for b in facts["boards"])]
    for manifest in manifests:
        assert manifest["digest"] == digest
        assert [call["value"] for call in manifest["seeding_calls"]] == ["5"]
    assert facts["boards"] == 2 * [{"digest": digest, "seed": 1234, "steps": [0, 1]}]
    assert "nothing is active in mlflow" in facts["inactive"]
    assert "wandb refused: UsageError" in facts["finished"]
    assert "logged to folder: folder/repro.json" in facts["finished"]
    assert PLANTED not in json.dumps(facts)


@pytest.mark.slow
def test_in_a_hydra_job_log_to_writes_beside_the_config_and_imports_no_tool(pytester):
    """Without targets, the job's output folder is the only destination."""
    done = pytester.runpython(pytester.makepyfile(HYDRA_APP))

    path = next(pytester.path.glob("outputs/*/*/.hydra/repro.json"))
    assert done.outlines == [f"hydra: {path}", "set()"]


def test_a_folder_contains_the_manifest_of_the_last_call(tmp_path, under_seed_only):
    """A missing folder is created, and contains one manifest after any number of calls."""
    with torchrepro.log_to(tmp_path / "new" / "run") as logged:
        torchrepro.stream("split", rank=0)

    manifest = json.loads((tmp_path / "new" / "run" / "repro.json").read_text(encoding="utf-8"))
    assert manifest["digest"] == under_seed_only.digest
    assert "split" in manifest["streams"], "drawn from after the first call"
    assert str(logged) == f"folder: {tmp_path}/new/run/repro.json"
    assert len(list((tmp_path / "new" / "run").iterdir())) == 1


@pytest.mark.parametrize(
    ("targets", "words"),
    [
        (["mlfow"], "did you mean: mlflow"),
        ([3], "legal: mlflow or a run of it"),
        (["mlflow"], "to do: start one: mlflow.start_run()"),
        (["tensorboard"], "pass the SummaryWriter itself"),
        ([], r"nothing is active.*\n.*wandb\.init\(\)"),
    ],
)
@pytest.mark.usefixtures("under_seed_only")
def test_an_unknown_or_inactive_target_is_refused(targets, words):
    """A typo creates no folder, and for a tool without a run the message says how to start one."""
    with pytest.raises(torchrepro.TorchreproError, match=words):
        torchrepro.log_to(*targets)


@pytest.mark.usefixtures("under_seed_only")
def test_a_target_may_be_the_name_of_a_folder(tmp_path, monkeypatch):
    """A word that is not close to the name of a tool is a folder, which is created."""
    monkeypatch.chdir(tmp_path)
    for name in ("folder", "runs", "out-1"):
        torchrepro.log_to(name)
        assert (tmp_path / name / "repro.json").is_file()


@pytest.mark.usefixtures("under_seed_only")
def test_a_refusal_at_the_end_does_not_hide_the_exception_of_the_block(tmp_path):
    """The program's exception propagates, with the refusal as a note."""

    def program():
        with torchrepro.log_to(tmp_path / "a"):
            (tmp_path / "a" / "repro.json").unlink()
            (tmp_path / "a" / "repro.json").mkdir()
            raise ValueError("mine")

    with pytest.raises(ValueError, match="mine") as caught:
        program()

    assert "log_to: folder refused: IsADirectoryError" in caught.value.__notes__[0]


def test_without_a_profile_nothing_is_logged(tmp_path):
    """Without an active profile `log_to` writes nothing and does not raise."""
    with torchrepro.log_to(tmp_path) as logged:
        pass

    assert str(logged.again()) == ""
    assert list(tmp_path.iterdir()) == []
