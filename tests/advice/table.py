"""The expected answer of `verify` for each program next to this file.

The folder of a row's name contains its program. Lines are written as in the program, without
leading and trailing spaces, so that formatting a program does not invalidate the table.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

SCRIPT: Final = ("python", "train.py")
TWO_RANKS: Final = ("torchrun", "--standalone", "--nproc-per-node=2", "train.py")


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a program: its file within the program's folder, and its text, stripped."""

    file: str
    text: str


@dataclass(frozen=True, slots=True)
class Varying:
    """A program that does not repeat."""

    name: str
    causes: tuple[str, ...]
    """Keys of CAUSES; the program is written for the first, the others are true too."""
    remedy: str
    """How a user would fix it, once the cause is known."""
    lines: tuple[Line, ...]
    """The lines that a user would have to change."""
    command: tuple[str, ...] = SCRIPT


@dataclass(frozen=True, slots=True)
class Repeating:
    """A program that repeats, and looks as if it did not."""

    name: str
    looks_like: str
    differs: tuple[Line, ...]
    """The lines whose ops differ from run to run, and reach no loss and no parameter."""
    command: tuple[str, ...] = SCRIPT


CAUSES: Final = {
    "clock": r"\bclock\b|\btime\.\w+|time_ns|time of day|datetime|perf_counter|monotonic",
    "entropy": r"entropy|urandom|secrets\b|uuid|SystemRandom",
    "unseeded": r"nothing (has )?(seed|gave)|no seed|not seeded|never seed|unseeded|without a seed"
    r"|seeds? (nothing|no generator)|(sets|gives|given) no seed",
    "hash": r"hash|order of (a |the |its )?sets?\b|PYTHONHASHSEED",
    "files": r"order of (the )?(files|entries|names)|listdir|scandir|iterdir|glob\b"
    r"|order .{0,40}(folder|director)",
    "address": r"\baddress|\bid\(|where .{0,30}(in memory|lies)",
    "threads": r"timing of|\bthreads?\b|as_completed|arriv|finish(es|ed)? first",
    "forked": r"\bfork|worker|\bchild(ren)?\b|\bpool\b|subprocess|another process",
    "state": r"(run|it) (wrote|writes|left|leaves)|written by|left (behind )?by|earlier run"
    r"|run before|(first|previous|other) run|reads back|that .{0,40}(writes|wrote|written)"
    r"|\bcached?\b",
    "unwritten": r"uninitiali[sz]ed|nothing (had |has )?(written|wrote)|unwritten"
    r"|never (been )?(written|filled)|not (been )?(written|initiali[sz]ed)"
    r"|(torch|np|numpy)\.empty",
    "race": r"\brace|\bthreads?\b.{0,80}(write|wrote|update|share|same|at once|one (array|tensor))"
    r"|(array|tensor|data).{0,80}\bthreads?\b",
    "budget": r"\bclock\b|\btime\.\w+|perf_counter|monotonic|deadline|time limit|budget|timeout"
    r"|max_time|timing of|arriv|how (long|fast)",
    "pid": r"\bpid\b|process (id|number)|process's id|getpid|(id|number) of (the|its) process",
}
"""Patterns for the printed text of a true cause, in any case of letters.

They match the meaning, not one wording.
"""

GUESSES: Final = (
    *(CAUSES[source] for source in ("clock", "entropy", "unseeded", "hash", "files", "address")),
    r"of (its|the program's) own",
    r"drew more",
)
"""A cause that matches three of these is a list of guesses: it names none of them."""

_VARYING: Final = """
sentiment_lstm | clock | a fixed number for the seed
  runtime.py
    torch.manual_seed(int(time.time()))
diffusion_noise | clock | a fixed seed for the generator, or --noise-seed 0
  noise.py
    seed = time.time_ns()
    self.generator.manual_seed(seed)
hydra_tabular | clock | a seed of the configuration for the split
  tabular.py
    rng = np.random.default_rng(int(datetime.now().timestamp() * 1e6))
ddp_rank_seed (two ranks) | clock | a fixed number as the base of the ranks' seeds
  distributed.py
    base = int(time.time() * 1000) % 2**31
    torch.manual_seed(base + rank)
bandit_exploration | entropy | the seed of the arguments for the agent's generator
  agent.py
    self.rng = np.random.RandomState(int.from_bytes(os.urandom(4), "little"))
patient_split | entropy | keys that are the same in every run: numbers, or digests of measurements
  study/records.py
    key: str = field(default_factory=lambda: uuid.uuid4().hex)
  study/splits.py
    keys = sorted(by_key)
ddp_augment (two ranks) | entropy | a seed of its own for each rank, made from a fixed number
  dataset.py
    self.rng = random.Random(secrets.randbits(64))
spiral_mlp | unseeded | a seed, by the program or by a profile
  train.py
    model = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1), nn.Flatten(0))
hydra_transformer | unseeded | a seed, by the program or by a profile
  nets/language_model.py
    self.embed = nn.Embedding(words, width)
  train.py
    model = LanguageModel(cfg.words, cfg.width, cfg.heads)
lightning_autoencoder | unseeded | L.seed_everything at the start, or a profile
  module.py
    self.encoder = nn.Sequential(nn.Linear(features, code), nn.ReLU())
  train.py
    trainer.fit(Autoencoder(), loader)
intent_hashing | hash | a digest of hashlib or zlib.crc32 in place of hash, or PYTHONHASHSEED
  features.py
    indices = [1 + hash(word) % (BUCKETS - 1) for word in words]
species_labels | hash | enumerate(sorted(names)), or PYTHONHASHSEED
  observations.py
    names = {row["species"] for row in rows}
    label_of = {name: label for label, name in enumerate(names)}
ddp_vocabulary (two ranks) | hash | enumerate(sorted(words)), or PYTHONHASHSEED
  text.py
    words = set(" ".join(LINES).split())
    self.index = {word: number for number, word in enumerate(words)}
shard_reader | files | sorted(os.listdir(folder))
  shards.py
    for name in os.listdir(folder):
bird_calls | files | sorted(folder.glob("*.npy"))
  audio/calls.py
    self.files = list(folder.glob("*.npy"))
speaker_folders | files | sort the entries by name
  corpus.py
    with os.scandir(folder) as entries:
    for entry in entries:
private_gradients | address | a list, in the order of model.parameters()
  privacy.py
    self.trainable = set(model.parameters()) - frozen
    self.inner = torch.optim.SGD(list(self.trainable), lr=lr)
    for parameter in self.trainable:
    nn.utils.clip_grad_norm_(list(self.trainable), 1.0)
citation_graph | address | return the list of papers, and keep citations in a list or a dict
  graph.py
    return set(papers)
  train.py
    papers = citations()
    number = {paper: index for index, paper in enumerate(papers)}
    edges = [(number[paper], number[cited]) for paper in papers for cited in paper.cites]
jittered_samples | address | the number of the sample as its seed
  samples.py
    rng = np.random.default_rng(id(self))
feature_cache | threads | go through the futures in the order in which they were submitted
  extraction.py
    for future in as_completed(futures):
    features.append(future.result())
document_queue | threads | one queue for each reader, read in turn
  readers.py
    self.batches.put(embed(document))
    yield self.batches.get()
    thread.start()
  train.py
    for batch in Readers(documents=12, workers=3):
noisy_prefetch | threads race | a generator of its own for the thread
  loading.py
    flipped = batch.flip(-1) if torch.rand(()) < 0.5 else batch
    self.ready.put(flipped + 0.1 * torch.randn_like(flipped))
    worker = Thread(target=self._prepare)
    worker.start()
simulated_rollouts | forked | a generator for each rollout, seeded with its number
  simulation.py
    speed = 0.9 * speed - 0.2 * position + np.random.normal(scale=0.1)
  train.py
    paths = torch.from_numpy(np.stack(pool.map(rollout, starts, chunksize=1))).float()
    with get_context("fork").Pool(args.processes) as pool:
masked_sentences | forked | a random.Random for each sentence, seeded with its number
  masking.py
    inputs = [MASK if random.random() < 0.3 else token for token in tokens]
  corpus.py
    with ProcessPoolExecutor(2, mp_context=get_context("fork")) as pool:
    inputs, targets = zip(*pool.map(mask, tokens), strict=True)
random_crops | forked clock | torch.initial_seed() in place of the clock, or no worker_init_fn
  crops.py
    np.random.seed((time.time_ns() + worker) % 2**32)
    def seed_worker(worker: int) -> None:
  train.py
    loader = DataLoader(
    Crops(24, 10, 6), batch_size=6, shuffle=True, num_workers=2, worker_init_fn=seed_worker
speech_trainer | state | a folder for each run, or a flag that asks to resume
  trainer.py
    if self.last.exists():
    state = torch.load(self.last)
    self.model.load_state_dict(state["model"])
    self.last = folder / "last.pt"
    torch.save(
weather_forecast | state | write the statistics without rounding, or use what was read back at once
  weather.py
    if file.exists():
    saved = json.loads(file.read_text())
    mean, std = saved["mean"], saved["std"]
    file.write_text(json.dumps({"mean": round(mean, 2), "std": round(std, 2)}))
ensemble_members | state | the number of the member as an argument
  lab/journal.py
    lines = self.path.read_text().splitlines() if self.path.exists() else []
    return len(lines)
    with self.path.open("a") as file:
  train.py
    member = Journal(Path("journal.jsonl")).begin(**vars(args))
    torch.manual_seed(args.seed + member)
moving_statistics | unwritten | torch.ones(features)
  layers.py
    self.register_buffer("variance", torch.empty(features))
padded_proteins | unwritten | np.zeros
  batching.py
    batch = np.empty((len(sequences), max(lengths)), dtype=np.uint8)
fourier_features | unwritten | nn.init.zeros_(self.phases) in reset_parameters
  net/waves.py
    self.phases = nn.Parameter(torch.empty(waves))
    nn.init.normal_(self.directions)
word_vectors | race threads | each thread sums up into an array of its own
  skipgram.py
    self.vectors += rate * pull
    worker.start()
    threading.Thread(target=self.sweep, args=(shift + 1, rate, passes))
  train.py
    vectors = Table(args.words, 24, seed=2).fit(args.threads)
pixel_statistics | race threads | each thread returns its own maximum, and these are joined in order
  statistics_pass.py
    np.logaddexp(highest, image, out=highest)
    list(pool.map(add, np.array_split(images, workers)))
    with ThreadPoolExecutor(workers) as pool:
  train.py
    centred = torch.from_numpy(images - soft_maximum(images, workers=4)).float()
click_counts | race threads | counts of its own for each thread, added once they have joined
  counting.py
    np.power(self.counts, self.fade, out=self.counts)
    np.add(self.counts, day, out=self.counts)
    counter.start()
  train.py
    counts = torch.from_numpy(count(clicks, cfg.products, cfg.workers)).float()
hyperparameter_search | budget | a number of tries in place of seconds
  search.py
    deadline = time.perf_counter() + seconds
    while time.perf_counter() < deadline:
lightning_time_limit | budget | max_steps in place of max_time
  train.py
    max_time=timedelta(seconds=3),
request_batches | budget threads | wait until a batch is full
  batcher.py
    item = self.requests.get(timeout=self.patience)
  train.py
    for batch in Batcher(requests, size=8, patience=0.0005):
augmented_digits | pid | np.random.seed(seed)
  vision/seeding.py
    np.random.seed(seed + os.getpid())
replay_sampling | pid | a fixed number as the seed of the memory's generator
  replay.py
    self.random = random.Random(f"{socket.gethostname()}-{os.getpid()}")
lightning_worker_seeds | pid forked | torch.initial_seed() in place of the pid, or no worker_init_fn
  data.py
    random.seed(os.getpid())
    def seed_process(_: int) -> None:
    return DataLoader(data, batch_size=8, num_workers=1, worker_init_fn=seed_process)
"""
"""Name, causes and remedy of a program; then each file, and below it the lines of it."""

_REPEATING: Final = """
clean_run_names | the clock and the process id in a folder's name, and seconds in a log
clean_experiment_ids | a uuid and a secret as the name of a run, the clock in Hydra's folder
clean_throughput_meter | a tensor of seconds, which only the printed throughput reads
  meters.py
    self.seconds.append(torch.tensor(now - self.last))
    return (batch_size / torch.stack(self.seconds).mean()).item()
clean_periodic_logging | a loss that is read whenever the clock says so
  train.py
    print(f"step {step} loss {loss.item():.4f}")
clean_timed_checkpoints | the model is copied and saved whenever the clock says so
  checkpoints.py
    torch.save(copy.deepcopy(model).state_dict(), self.path)
clean_sorted_vocabulary | a vocabulary from a set of strings, sorted; a set that is only asked
clean_parallel_preprocessing | a pool of processes, whose results come in order, and their ids
clean_indexed_futures | threads in the order in which they end, each result at its own place
clean_item_augmentation | `random` in workers of a loader, seeded by the item
clean_preallocated_buffers | memory that is not initialised, and written before it is read
clean_address_cache | addresses as keys of a dict that is only asked
clean_replica_threads | three models trained in threads, each with a generator of its own
clean_background_loading | one thread that loads ahead, and draws nothing that others draw
clean_feature_file | a file that the first run writes and the next one reads: the same numbers
clean_position_hashing | hashes and a set of pairs of ints
clean_module_registry | modules and settings in the order of dicts
clean_flaky_storage | reads that fail by chance and are tried again
clean_sorted_shards | os.listdir of files that threads wrote, sorted
clean_lightning_accumulation | gradients added up over batches, seconds in a callback
clean_restarted_training | a checkpoint that is read, and removed before each run
"""
"""Name of a program, and what it looks like; then files and lines whose ops differ."""


def _rows(table: str) -> Iterator[tuple[list[str], tuple[Line, ...]]]:
    """Yield what stands in the first line of each row, and the lines of programs below it."""
    first, file = [""], ""
    lines: list[Line] = []
    for line in [*table.strip().splitlines(), ""]:
        if line.startswith("    "):
            lines.append(Line(file, line.strip()))
        elif line.startswith("  "):
            file = line.strip()
        else:
            if first[0]:
                yield first, tuple(lines)
            first, lines = line.split(" | "), []


VARYING: Final = tuple(
    Varying(
        name.removesuffix(" (two ranks)"),
        tuple(causes.split()),
        remedy,
        lines,
        TWO_RANKS if name.endswith(" (two ranks)") else SCRIPT,
    )
    for (name, causes, remedy), lines in _rows(_VARYING)
)
REPEATING: Final = tuple(Repeating(*first, lines) for first, lines in _rows(_REPEATING))
