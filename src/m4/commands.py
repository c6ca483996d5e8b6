"""What the command line can do: one frozen dataclass of options for each subcommand, which is then called."""

from __future__ import annotations

import dataclasses
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, TextIO

import jax
import tyro

from gshard import GShardError
from m4 import score
from m4.checkpoint_command import Checkpoint
from m4.config import ModelChoice, Run, TrainConfig
from m4.decode import DecodeConfig
from m4.demo import demo, describe_model, plan_summary
from m4.prepare import PrepareConfig, open_text, prepare
from m4.processes import Alone, Group
from m4.stopping import STOPPED, asked_to_stop
from m4.together import Processes, Together
from m4.train import compile_step, held_out_cross_entropy, make_evaluation, train
from m4.translate import load

DATA = Path("data/quick-start")
RUN = Path("runs/first")


class CommandError(GShardError):
    """What was asked for on the command line cannot be done."""


@dataclasses.dataclass(frozen=True)
class Prepare:
    """Makes a corpus ready for training: downloads, cleans, splits off held-out sentences, learns vocabularies."""

    corpus: tyro.conf.OmitArgPrefixes[PrepareConfig] = dataclasses.field(default_factory=PrepareConfig)
    devices: tyro.conf.Suppress[int] = 1

    def __call__(self) -> int:
        """Prepares."""
        print(prepare(self.corpus))
        return 0


@dataclasses.dataclass(frozen=True)
class Train:
    """Trains a model on a prepared corpus.

    Attributes:
        data: folder of the prepared corpus.
        run: folder of the run: checkpoints and metrics.jsonl.
        devices: devices to partition the model over; on a machine without accelerators they are virtual ones.
        resume: go on from the newest sound checkpoint of the run.
        plan: only say how the step would be partitioned over so many devices, which need not exist.
        model: which model.
        train: how to train it.
        together: the processes that train together, one or several for each machine.
    """

    data: Path = DATA
    run: Path = RUN
    devices: int = 8
    resume: bool = False
    plan: bool = False
    model: tyro.conf.OmitArgPrefixes[ModelChoice] = dataclasses.field(default_factory=ModelChoice)
    train: tyro.conf.OmitArgPrefixes[TrainConfig] = dataclasses.field(default_factory=TrainConfig)
    together: tyro.conf.OmitArgPrefixes[Processes] = dataclasses.field(default_factory=Processes)

    @property
    def virtual_devices(self) -> int:
        """Of this process, where devices are virtual."""
        if self.devices % self.together.processes:
            raise CommandError(
                f"{self.devices} devices cannot be dealt out to {self.together.processes} processes.",
                way_out="Give --devices, the devices of all processes together, as a multiple of --processes.",
            )
        return 1 if self.plan else self.devices // self.together.processes

    def __call__(self) -> int:
        """Trains; SIGTERM saves and ends with exit code 143."""
        if self.plan:
            return self._plan()
        if self.together.several:
            self.together.initialize()
            return self._train(Together(self.together, Run(self.run).checkpoints))
        return self._train(Alone())

    def _plan(self) -> int:
        text = open_text(self.data)
        model = self.model.transformer(text.source_vocabulary, text.target_vocabulary, self.devices)
        print(describe_model(model))
        print(plan_summary(model, self.train, text.batch(0)))
        return 0

    def _train(self, group: Group) -> int:
        # SIGTERM after jax.distributed, whose handler would swallow it.
        with group, asked_to_stop() as asked:
            _check_devices(self.devices)
            text = open_text(self.data)
            model = self.model.transformer(text.source_vocabulary, text.target_vocabulary, self.devices)
            result = train(
                model,
                self.train,
                Run(self.run),
                text.batch,
                text.held_out(),
                meta={"vocabularies": text.fingerprint},
                resume=self.resume,
                stop=asked,
                group=group,
            )
        if not group.first:
            return STOPPED if result.stopped else 0
        speed = f"{result.tokens_per_second:,.0f} target tokens/s, {result.seconds_per_step:.3f} s a step"
        print(f"{speed}; saved: {self.run}")
        if result.stopped:
            again = [word for word in sys.argv[1:] if word != "--resume"]
            print(f"stopped as asked after step {result.steps}; go on with: {shlex.join(['m4', *again, '--resume'])}")
            return STOPPED
        return 0


@dataclasses.dataclass(frozen=True)
class Translate:
    """Translates lines of text into English, one line of output for each line of input.

    Attributes:
        input: a text file in UTF-8; standard input if not given.
        output: where to write; standard output if not given.
        data: folder of the corpus the model was trained on, for its vocabularies.
        run: folder of the run.
        step: which checkpoint; the newest if not given.
        search: how to search.
    """

    input: Annotated[Path | None, tyro.conf.Positional] = None
    output: Path | None = None
    data: Path = DATA
    run: Path = RUN
    step: int | None = None
    search: tyro.conf.OmitArgPrefixes[DecodeConfig] = dataclasses.field(default_factory=DecodeConfig)
    devices: tyro.conf.Suppress[int] = 1

    def __call__(self) -> int:
        """Translates in blocks, so that neither a long input nor a slow reader fills the memory."""
        translator = load(Run(self.run), open_text(self.data), self.search, self.step)
        cut = 0
        with _reading(self.input) as source, _writing(self.output) as target:
            for block in _blocks(source, 16 * translator.batch):
                for translated in translator.translate(block):
                    cut += translated.cut
                    target.write(translated.text + "\n")
                target.flush()
        if cut:
            limit = translator.text.length - 1
            print(f"m4: {cut} lines were longer than {limit} tokens; only their beginning was read", file=sys.stderr)
        return 0


@dataclasses.dataclass(frozen=True)
class Evaluate:
    """Measures a model on held-out sentences: cross entropy, BLEU and chrF for each language, beside two baselines.

    Attributes:
        data: folder of the corpus the model was trained on.
        run: folder of the run.
        step: which checkpoint; the newest if not given.
        sentences: held-out sentences to translate.
        search: how to search.
    """

    data: Path = DATA
    run: Path = RUN
    step: int | None = None
    sentences: int = 1000
    search: tyro.conf.OmitArgPrefixes[DecodeConfig] = dataclasses.field(default_factory=DecodeConfig)
    devices: tyro.conf.Suppress[int] = 1

    def __call__(self) -> int:
        """Evaluates on one device."""
        if self.sentences < 1:
            raise CommandError(f"cannot score {self.sentences} sentences.", way_out="Ask for at least one.")
        text = open_text(self.data)
        translator = load(Run(self.run), text, self.search, self.step)
        model = dataclasses.replace(translator.model, partitions=1)
        held_out = compile_step(make_evaluation(model), 1, donate=False)
        value = held_out_cross_entropy(held_out, translator.params, text.held_out())
        print(f"held-out cross entropy: {value:.3f} nats a token\n")
        examples = text.examples(self.sentences)
        sources, references, languages = ([e[i] for e in examples] for i in (1, 2, 0))
        written = [t.text for t in translator.translate(sources)]
        systems = {"model": score.score(written, references, languages)}
        systems |= score.baselines(sources, references, languages, text.frequent_sentence())
        print(score.table(systems))
        print(f"\n{systems['model'][score.ALL].signature}")
        return 0


def _demo_training() -> TrainConfig:
    return TrainConfig(steps=800, warmup_steps=50)


@dataclasses.dataclass(frozen=True)
class Demo:
    """Everything once in a few minutes: prepares a small corpus, shows how training is partitioned, trains, translates.

    Attributes:
        corpus: the corpus.
        run: folder of the run; a number is added if it has a model already.
        devices: devices to partition the model over; on a machine without accelerators they are virtual ones.
        model: which model.
        train: how to train it.
        search: how to search.
        sentences: held-out sentences to score.
    """

    run: Path = Path("runs/demo")
    devices: int = 8
    sentences: int = 200
    corpus: tyro.conf.OmitArgPrefixes[PrepareConfig] = dataclasses.field(default_factory=PrepareConfig)
    model: tyro.conf.OmitArgPrefixes[ModelChoice] = dataclasses.field(default_factory=ModelChoice)
    train: tyro.conf.OmitArgPrefixes[TrainConfig] = dataclasses.field(default_factory=_demo_training)
    search: tyro.conf.OmitArgPrefixes[DecodeConfig] = dataclasses.field(default_factory=DecodeConfig)

    def __call__(self) -> int:
        """Runs the demo."""
        began = time.perf_counter()
        _check_devices(self.devices)
        print(prepare(self.corpus))
        text = open_text(self.corpus.output)
        model = self.model.transformer(text.source_vocabulary, text.target_vocabulary, self.devices)
        demo(text, model, self.train, _unused(self.run), self.search, sentences=self.sentences, began=began)
        return 0


COMMANDS: dict[str, Callable[..., Any]] = {
    "prepare": Prepare,
    "train": Train,
    "translate": Translate,
    "evaluate": Evaluate,
    "checkpoint": Checkpoint,
    "demo": Demo,
}


def _check_devices(count: int) -> None:
    present = len(jax.devices())
    if not 1 <= count <= present:
        raise CommandError(
            f"cannot use {count} devices.",
            got=f"{present} devices of kind {jax.devices()[0].device_kind!r}",
            way_out="Ask with --devices for as many as there are, or fewer.",
        )


def _unused(folder: Path) -> Run:
    """The run of this name, or of the first numbered name that has no checkpoint."""
    names = (folder if n == 1 else folder.with_name(f"{folder.name}-{n}") for n in range(1, 10_000))
    return next(run for run in map(Run, names) if not run.checkpoints.exists())


@contextmanager
def _reading(path: Path | None) -> Iterator[TextIO]:
    if path is None:
        sys.stdin.reconfigure(encoding="utf-8", errors="replace")  # type: ignore[union-attr]
        yield sys.stdin
        return
    try:
        file = path.open(encoding="utf-8", errors="replace")
    except OSError as error:
        raise CommandError(f"the input cannot be read: {error.strerror}.", where=str(path)) from error
    with file:
        yield file


@contextmanager
def _writing(path: Path | None) -> Iterator[TextIO]:
    if path is None:
        sys.stdout.reconfigure(encoding="utf-8")  # type: ignore[union-attr]
        yield sys.stdout
        return
    try:
        file = path.open("w", encoding="utf-8")
    except OSError as error:
        raise CommandError(f"the output cannot be written: {error.strerror}.", where=str(path)) from error
    with file:
        yield file


def _blocks(lines: TextIO, size: int) -> Iterator[list[str]]:
    block: list[str] = []
    for line in lines:
        block.append(line.rstrip("\r\n"))
        if len(block) == size:
            yield block
            block = []
    if block:
        yield block
