"""What is expected of `verify` on each program beside this file.

The folder of a row's name holds its program. Lines are written as they stand in it, without the
spaces around them, so that formatting a program does not make the table wrong.
"""

from dataclasses import dataclass, field
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
    cause: str
    """A key of CAUSES."""
    lines: tuple[Line, ...]
    """The lines of which a user would say: that is the one that I have to change."""
    remedy: str
    """What a user would do about it, once the cause is known."""
    command: tuple[str, ...] = SCRIPT
    profile: str | None = None
    causes: tuple[str, ...] = ()
    """Further causes that are true as well."""


@dataclass(frozen=True, slots=True)
class Repeating:
    """A program that repeats, and looks as if it did not."""

    name: str
    looks_like: str
    command: tuple[str, ...] = SCRIPT
    profile: str | None = None
    differs: tuple[Line, ...] = field(default=())
    """The lines whose ops differ from run to run, and reach no loss and no parameter."""


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
"""What the printed text of a true cause matches, upper and lower case alike.

Written on the sense and not on a wording.
"""

GUESSES: Final = (
    *(CAUSES[source] for source in ("clock", "entropy", "unseeded", "hash", "files", "address")),
    r"of (its|the program's) own",
    r"drew more",
)
"""A cause that matches three of these is a list of guesses: it names none of them."""

VARYING: Final = (
    Varying(
        name="sentiment_lstm",
        cause="clock",
        lines=(Line("runtime.py", "torch.manual_seed(int(time.time()))"),),
        remedy="a fixed number for the seed",
    ),
    Varying(
        name="diffusion_noise",
        cause="clock",
        lines=(
            Line("noise.py", "seed = time.time_ns()"),
            Line("noise.py", "self.generator.manual_seed(seed)"),
        ),
        remedy="a fixed seed for the generator, or --noise-seed 0",
    ),
    Varying(
        name="hydra_tabular",
        cause="clock",
        lines=(
            Line(
                "tabular.py", "rng = np.random.default_rng(int(datetime.now().timestamp() * 1e6))"
            ),
        ),
        remedy="a seed of the configuration for the split",
    ),
    Varying(
        name="ddp_rank_seed",
        cause="clock",
        lines=(
            Line("distributed.py", "base = int(time.time() * 1000) % 2**31"),
            Line("distributed.py", "torch.manual_seed(base + rank)"),
        ),
        remedy="a fixed number as the base of the ranks' seeds",
        command=TWO_RANKS,
    ),
    Varying(
        name="bandit_exploration",
        cause="entropy",
        lines=(
            Line(
                "agent.py",
                'self.rng = np.random.RandomState(int.from_bytes(os.urandom(4), "little"))',
            ),
        ),
        remedy="the seed of the arguments for the agent's generator",
    ),
    Varying(
        name="patient_split",
        cause="entropy",
        lines=(
            Line("study/records.py", "key: str = field(default_factory=lambda: uuid.uuid4().hex)"),
            Line("study/splits.py", "keys = sorted(by_key)"),
        ),
        remedy="keys that are the same in every run: a number, or a digest of the measurements",
    ),
    Varying(
        name="ddp_augment",
        cause="entropy",
        lines=(Line("dataset.py", "self.rng = random.Random(secrets.randbits(64))"),),
        remedy="a seed of its own for each rank, made from a fixed number",
        command=TWO_RANKS,
    ),
    Varying(
        name="spiral_mlp",
        cause="unseeded",
        lines=(
            Line(
                "train.py",
                "model = nn.Sequential("
                "nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1), nn.Flatten(0))",
            ),
        ),
        remedy="a seed, by the program or by a profile",
    ),
    Varying(
        name="hydra_transformer",
        cause="unseeded",
        lines=(
            Line("nets/language_model.py", "self.embed = nn.Embedding(words, width)"),
            Line("train.py", "model = LanguageModel(cfg.words, cfg.width, cfg.heads)"),
        ),
        remedy="a seed, by the program or by a profile",
    ),
    Varying(
        name="lightning_autoencoder",
        cause="unseeded",
        lines=(
            Line("module.py", "self.encoder = nn.Sequential(nn.Linear(features, code), nn.ReLU())"),
            Line("train.py", "trainer.fit(Autoencoder(), loader)"),
        ),
        remedy="L.seed_everything at the start, or a profile",
    ),
    Varying(
        name="intent_hashing",
        cause="hash",
        lines=(
            Line("features.py", "indices = [1 + hash(word) % (BUCKETS - 1) for word in words]"),
        ),
        remedy="a digest of hashlib or zlib.crc32 in place of hash, or PYTHONHASHSEED",
    ),
    Varying(
        name="species_labels",
        cause="hash",
        lines=(
            Line("observations.py", 'names = {row["species"] for row in rows}'),
            Line(
                "observations.py",
                "label_of = {name: label for label, name in enumerate(names)}",
            ),
        ),
        remedy="enumerate(sorted(names)), or PYTHONHASHSEED",
    ),
    Varying(
        name="ddp_vocabulary",
        cause="hash",
        lines=(
            Line("text.py", 'words = set(" ".join(LINES).split())'),
            Line("text.py", "self.index = {word: number for number, word in enumerate(words)}"),
        ),
        remedy="enumerate(sorted(words)), or PYTHONHASHSEED",
        command=TWO_RANKS,
    ),
    Varying(
        name="shard_reader",
        cause="files",
        lines=(Line("shards.py", "for name in os.listdir(folder):"),),
        remedy="sorted(os.listdir(folder))",
    ),
    Varying(
        name="bird_calls",
        cause="files",
        lines=(Line("audio/calls.py", 'self.files = list(folder.glob("*.npy"))'),),
        remedy='sorted(folder.glob("*.npy"))',
    ),
    Varying(
        name="speaker_folders",
        cause="files",
        lines=(
            Line("corpus.py", "with os.scandir(folder) as entries:"),
            Line("corpus.py", "for entry in entries:"),
        ),
        remedy="sort the entries by name",
    ),
    Varying(
        name="private_gradients",
        cause="address",
        lines=(
            Line("privacy.py", "self.trainable = set(model.parameters()) - frozen"),
            Line("privacy.py", "self.inner = torch.optim.SGD(list(self.trainable), lr=lr)"),
            Line("privacy.py", "for parameter in self.trainable:"),
            Line("privacy.py", "nn.utils.clip_grad_norm_(list(self.trainable), 1.0)"),
        ),
        remedy="a list, in the order of model.parameters()",
    ),
    Varying(
        name="citation_graph",
        cause="address",
        lines=(
            Line("graph.py", "return set(papers)"),
            Line("train.py", "papers = citations()"),
            Line("train.py", "number = {paper: index for index, paper in enumerate(papers)}"),
            Line(
                "train.py",
                "edges = [(number[paper], number[cited]) "
                "for paper in papers for cited in paper.cites]",
            ),
        ),
        remedy="return the list of papers, and keep citations in a list or a dict",
    ),
    Varying(
        name="jittered_samples",
        cause="address",
        lines=(Line("samples.py", "rng = np.random.default_rng(id(self))"),),
        remedy="the number of the sample as its seed",
    ),
    Varying(
        name="feature_cache",
        cause="threads",
        lines=(
            Line("extraction.py", "for future in as_completed(futures):"),
            Line("extraction.py", "features.append(future.result())"),
        ),
        remedy="go through the futures in the order in which they were submitted",
    ),
    Varying(
        name="document_queue",
        cause="threads",
        lines=(
            Line("readers.py", "self.batches.put(embed(document))"),
            Line("readers.py", "yield self.batches.get()"),
            Line("readers.py", "thread.start()"),
            Line("train.py", "for batch in Readers(documents=12, workers=3):"),
        ),
        remedy="one queue for each reader, read in turn",
    ),
    Varying(
        name="noisy_prefetch",
        cause="threads",
        lines=(
            Line("loading.py", "flipped = batch.flip(-1) if torch.rand(()) < 0.5 else batch"),
            Line("loading.py", "self.ready.put(flipped + 0.1 * torch.randn_like(flipped))"),
            Line("loading.py", "worker = Thread(target=self._prepare)"),
            Line("loading.py", "worker.start()"),
        ),
        remedy="a generator of its own for the thread",
        causes=("race",),
    ),
    Varying(
        name="simulated_rollouts",
        cause="forked",
        lines=(
            Line(
                "simulation.py",
                "speed = 0.9 * speed - 0.2 * position + np.random.normal(scale=0.1)",
            ),
            Line(
                "train.py",
                "paths = torch.from_numpy("
                "np.stack(pool.map(rollout, starts, chunksize=1))).float()",
            ),
            Line("train.py", 'with get_context("fork").Pool(args.processes) as pool:'),
        ),
        remedy="a generator for each rollout, seeded with its number",
    ),
    Varying(
        name="masked_sentences",
        cause="forked",
        lines=(
            Line(
                "masking.py",
                "inputs = [MASK if random.random() < 0.3 else token for token in tokens]",
            ),
            Line(
                "corpus.py",
                'with ProcessPoolExecutor(2, mp_context=get_context("fork")) as pool:',
            ),
            Line("corpus.py", "inputs, targets = zip(*pool.map(mask, tokens), strict=True)"),
        ),
        remedy="a random.Random for each sentence, seeded with its number",
    ),
    Varying(
        name="random_crops",
        cause="forked",
        lines=(
            Line("crops.py", "np.random.seed((time.time_ns() + worker) % 2**32)"),
            Line("crops.py", "def seed_worker(worker: int) -> None:"),
            Line("train.py", "loader = DataLoader("),
            Line(
                "train.py",
                "Crops(24, 10, 6), batch_size=6, shuffle=True, num_workers=2, "
                "worker_init_fn=seed_worker",
            ),
        ),
        remedy="torch.initial_seed() in place of the clock, or no worker_init_fn",
        causes=("clock",),
    ),
    Varying(
        name="speech_trainer",
        cause="state",
        lines=(
            Line("trainer.py", "if self.last.exists():"),
            Line("trainer.py", "state = torch.load(self.last)"),
            Line("trainer.py", 'self.model.load_state_dict(state["model"])'),
            Line("trainer.py", 'self.last = folder / "last.pt"'),
            Line("trainer.py", "torch.save("),
        ),
        remedy="a folder for each run, or a flag that asks to resume",
    ),
    Varying(
        name="weather_forecast",
        cause="state",
        lines=(
            Line("weather.py", "if file.exists():"),
            Line("weather.py", "saved = json.loads(file.read_text())"),
            Line("weather.py", 'mean, std = saved["mean"], saved["std"]'),
            Line(
                "weather.py",
                'file.write_text(json.dumps({"mean": round(mean, 2), "std": round(std, 2)}))',
            ),
        ),
        remedy="write the statistics without rounding, or use what was read back at once",
    ),
    Varying(
        name="ensemble_members",
        cause="state",
        lines=(
            Line(
                "lab/journal.py",
                "lines = self.path.read_text().splitlines() if self.path.exists() else []",
            ),
            Line("lab/journal.py", "return len(lines)"),
            Line("lab/journal.py", 'with self.path.open("a") as file:'),
            Line(
                "train.py",
                'member = Journal(Path("journal.jsonl")).begin(**vars(args))',
            ),
            Line("train.py", "torch.manual_seed(args.seed + member)"),
        ),
        remedy="the number of the member as an argument",
    ),
    Varying(
        name="moving_statistics",
        cause="unwritten",
        lines=(Line("layers.py", 'self.register_buffer("variance", torch.empty(features))'),),
        remedy="torch.ones(features)",
    ),
    Varying(
        name="padded_proteins",
        cause="unwritten",
        lines=(
            Line(
                "batching.py",
                "batch = np.empty((len(sequences), max(lengths)), dtype=np.uint8)",
            ),
        ),
        remedy="np.zeros",
    ),
    Varying(
        name="fourier_features",
        cause="unwritten",
        lines=(
            Line("net/waves.py", "self.phases = nn.Parameter(torch.empty(waves))"),
            Line("net/waves.py", "nn.init.normal_(self.directions)"),
        ),
        remedy="nn.init.zeros_(self.phases) in reset_parameters",
    ),
    Varying(
        name="word_vectors",
        cause="race",
        lines=(
            Line("skipgram.py", "self.vectors += rate * pull"),
            Line("skipgram.py", "worker.start()"),
            Line(
                "skipgram.py", "threading.Thread(target=self.sweep, args=(shift + 1, rate, passes))"
            ),
            Line("train.py", "vectors = Table(args.words, 24, seed=2).fit(args.threads)"),
        ),
        remedy="each thread sums up into an array of its own",
        causes=("threads",),
    ),
    Varying(
        name="pixel_statistics",
        cause="race",
        lines=(
            Line("statistics_pass.py", "np.logaddexp(highest, image, out=highest)"),
            Line(
                "statistics_pass.py",
                "list(pool.map(add, np.array_split(images, workers)))",
            ),
            Line("statistics_pass.py", "with ThreadPoolExecutor(workers) as pool:"),
            Line(
                "train.py",
                "centred = torch.from_numpy(images - soft_maximum(images, workers=4)).float()",
            ),
        ),
        remedy="each thread returns a maximum of its own, and these are joined in order",
        causes=("threads",),
    ),
    Varying(
        name="click_counts",
        cause="race",
        lines=(
            Line("counting.py", "np.power(self.counts, self.fade, out=self.counts)"),
            Line("counting.py", "np.add(self.counts, day, out=self.counts)"),
            Line("counting.py", "counter.start()"),
            Line(
                "train.py",
                "counts = torch.from_numpy(count(clicks, cfg.products, cfg.workers)).float()",
            ),
        ),
        remedy="counts of its own for each thread, added once they have joined",
        causes=("threads",),
    ),
    Varying(
        name="hyperparameter_search",
        cause="budget",
        lines=(
            Line("search.py", "deadline = time.perf_counter() + seconds"),
            Line("search.py", "while time.perf_counter() < deadline:"),
        ),
        remedy="a number of tries in place of seconds",
    ),
    Varying(
        name="lightning_time_limit",
        cause="budget",
        lines=(Line("train.py", "max_time=timedelta(seconds=3),"),),
        remedy="max_steps in place of max_time",
    ),
    Varying(
        name="request_batches",
        cause="budget",
        lines=(
            Line("batcher.py", "item = self.requests.get(timeout=self.patience)"),
            Line("train.py", "for batch in Batcher(requests, size=8, patience=0.0005):"),
        ),
        remedy="wait until a batch is full",
        causes=("threads",),
    ),
    Varying(
        name="augmented_digits",
        cause="pid",
        lines=(Line("vision/seeding.py", "np.random.seed(seed + os.getpid())"),),
        remedy="np.random.seed(seed)",
    ),
    Varying(
        name="replay_sampling",
        cause="pid",
        lines=(
            Line(
                "replay.py",
                'self.random = random.Random(f"{socket.gethostname()}-{os.getpid()}")',
            ),
        ),
        remedy="a fixed number as the seed of the memory's generator",
    ),
    Varying(
        name="lightning_worker_seeds",
        cause="pid",
        lines=(
            Line("data.py", "random.seed(os.getpid())"),
            Line("data.py", "def seed_process(_: int) -> None:"),
            Line(
                "data.py",
                "return DataLoader(data, batch_size=8, num_workers=1, worker_init_fn=seed_process)",
            ),
        ),
        remedy="torch.initial_seed() in place of the process id, or no worker_init_fn",
        causes=("forked",),
    ),
)

REPEATING: Final = (
    Repeating(
        name="clean_run_names",
        looks_like="the clock and the process id in a folder's name, and seconds in a log",
    ),
    Repeating(
        name="clean_experiment_ids",
        looks_like="a uuid and a secret as the name of a run, the clock in Hydra's folder",
    ),
    Repeating(
        name="clean_throughput_meter",
        looks_like="a tensor of seconds, which only the printed throughput reads",
        differs=(
            Line("meters.py", "self.seconds.append(torch.tensor(now - self.last))"),
            Line("meters.py", "return (batch_size / torch.stack(self.seconds).mean()).item()"),
        ),
    ),
    Repeating(
        name="clean_periodic_logging",
        looks_like="a loss that is read whenever the clock says so",
        differs=(Line("train.py", 'print(f"step {step} loss {loss.item():.4f}")'),),
    ),
    Repeating(
        name="clean_timed_checkpoints",
        looks_like="the model is copied and saved whenever the clock says so",
        differs=(
            Line("checkpoints.py", "torch.save(copy.deepcopy(model).state_dict(), self.path)"),
        ),
    ),
    Repeating(
        name="clean_sorted_vocabulary",
        looks_like="a vocabulary from a set of strings, sorted; a set that is only asked",
    ),
    Repeating(
        name="clean_parallel_preprocessing",
        looks_like="a pool of processes, whose results come in order, and their ids",
    ),
    Repeating(
        name="clean_indexed_futures",
        looks_like="threads in the order in which they end, each result at its own place",
    ),
    Repeating(
        name="clean_item_augmentation",
        looks_like="`random` in workers of a loader, seeded by the item",
    ),
    Repeating(
        name="clean_preallocated_buffers",
        looks_like="memory that is not initialised, and written before it is read",
    ),
    Repeating(
        name="clean_address_cache",
        looks_like="addresses as keys of a dict that is only asked",
    ),
    Repeating(
        name="clean_replica_threads",
        looks_like="three models trained in threads, each with a generator of its own",
    ),
    Repeating(
        name="clean_background_loading",
        looks_like="one thread that loads ahead, and draws nothing that others draw",
    ),
    Repeating(
        name="clean_feature_file",
        looks_like="a file that the first run writes and the next one reads: the same numbers",
    ),
    Repeating(
        name="clean_position_hashing",
        looks_like="hashes and a set of pairs of ints",
    ),
    Repeating(
        name="clean_module_registry",
        looks_like="modules and settings in the order of dicts",
    ),
    Repeating(
        name="clean_flaky_storage",
        looks_like="reads that fail by chance and are tried again",
    ),
    Repeating(
        name="clean_sorted_shards",
        looks_like="os.listdir of files that threads wrote, sorted",
    ),
    Repeating(
        name="clean_lightning_accumulation",
        looks_like="gradients added up over batches, seconds in a callback",
    ),
    Repeating(
        name="clean_restarted_training",
        looks_like="a checkpoint that is read, and removed before each run",
    ),
)
