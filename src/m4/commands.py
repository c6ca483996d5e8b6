"""What the command line can do: one frozen dataclass of options for each subcommand, which is then called."""

from __future__ import annotations

import dataclasses
import importlib
import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import jax
import tyro

from m4 import evaluate, lines, score
from m4.checkpoint_command import Checkpoint
from m4.config import ModelChoice, Run, TrainConfig
from m4.decode import DecodeConfig
from m4.demo import demo, describe_model, plan_summary
from m4.errors import CommandError
from m4.groups import model_for
from m4.prepare import PrepareConfig, open_text, prepare
from m4.processes import Alone, Group
from m4.serve.config import ServeConfig
from m4.stopping import STOPPED, asked_to_stop
from m4.text import PreparedText
from m4.together import Processes, Together
from m4.train import compile_step, held_out_cross_entropy, make_evaluation, train
from m4.translate import Translator, load

DATA = Path("data/quick-start")
RUN = Path("runs/first")


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
        languages: train on these languages of the corpus only, for a bilingual baseline, say; on all if not given.
        tokens: tokens of a batch on each side; if not given, what the corpus was prepared for.
        plan: only say how the step would be partitioned over so many devices, which need not exist.
        model: which model.
        train: how to train it.
        together: the processes that train together, one or several for each machine.
    """

    data: Path = DATA
    run: Path = RUN
    devices: int = 8
    resume: bool = False
    languages: tuple[str, ...] = ()
    tokens: int | None = None
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
        text = self._text()
        model = model_for(self.model, text, self.devices, self.train)
        print(describe_model(model))
        print(plan_summary(model, self.train, text.batch(0)))
        return 0

    def _text(self) -> PreparedText:
        text = open_text(self.data)
        if self.tokens is not None:
            if self.tokens < text.length:
                raise CommandError(
                    f"a batch of {self.tokens} tokens cannot hold a sentence of {text.length}.",
                    way_out=f"Give --tokens of {text.length} or more.",
                )
            text = text.rebatched(tokens=self.tokens)
        return text.of_languages(self.languages) if self.languages else text

    def _train(self, group: Group) -> int:
        # SIGTERM after jax.distributed, whose handler would swallow it.
        with group, asked_to_stop() as asked:
            _check_devices(self.devices)
            text = self._text()
            model = model_for(self.model, text, self.devices, self.train, print if group.first else lambda line: None)
            result = train(
                model,
                self.train,
                Run(self.run),
                text.batch,
                text.held_out(),
                meta={"vocabularies": text.fingerprint, "only": sorted(self.languages), "corpus": text.digest},
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
        input: a text file in UTF-8; if not given, standard input, which may be a pipe or a person.
        output: where to write; standard output if not given.
        language: the language of the input, one that the model knows; it is told to the model, which otherwise tells
            languages apart by itself.
        data: folder of the corpus the model was trained on, for its vocabularies.
        run: folder of the run.
        step: which checkpoint; the newest if not given.
        replace_invalid: read bytes that are not UTF-8 as a replacement character, instead of stopping there.
        quiet: do not tell how fast it goes.
        batch: sentences that are translated together.
        devices: devices to partition the search over.
        search: how to search.
    """

    input: Annotated[Path | None, tyro.conf.Positional] = None
    output: Path | None = None
    language: Annotated[str | None, tyro.conf.arg(name="from")] = None
    data: Path = DATA
    run: Path = RUN
    step: int | None = None
    replace_invalid: bool = False
    quiet: bool = False
    batch: int = 32
    devices: int = 1
    search: tyro.conf.OmitArgPrefixes[DecodeConfig] = dataclasses.field(default_factory=DecodeConfig)

    def __call__(self) -> int:
        """Translates in blocks, so that neither a long input nor a slow reader fills the memory."""
        _check_devices(self.devices)
        lines.check_files(self.input, self.output)
        text = open_text(self.data)
        translator = load(Run(self.run), text, self.search, self.step, batch=self.batch, devices=self.devices)
        language = None if self.language is None else translator.check_language(self.language)
        by_hand = self.input is None and sys.stdin.isatty()
        speed = lines.Speed(live=False if by_hand or (self.output is None and sys.stdout.isatty()) else None)
        with lines.reading(self.input, self.replace_invalid, by_hand) as source, lines.writing(self.output) as target:
            groups = ([line] for line in source) if by_hand else lines.blocks(source, 16 * self.batch)
            try:
                for group in groups:
                    translated = translator.translate(group, language)
                    lines.write(translated, speed.lines, self.search.n_best, target)
                    speed.add(translated)
            finally:
                if not self.quiet and speed.lines:
                    speed.end(translator.text.length - 1)
        return 0


@dataclasses.dataclass(frozen=True)
class Evaluate:
    """Measures a model on held-out sentences: cross entropy, BLEU and chrF++ for each language, beside baselines.

    Attributes:
        data: folder of the corpus the model was trained on.
        run: folder of the run.
        step: which checkpoint; the newest if not given.
        sentences: held-out sentences to translate, as many of each language as there are.
        languages: score these languages only; all that the model was trained on if not given.
        output: where to write results.json, scores.csv, translations.tsv and languages.svg; if not given, the folder
            "evaluation" of the run.
        baselines: what to form differences to: folders with results.json, or runs of the same corpus, which are then
            translated with, too; RUN@STEP is one checkpoint. Several that share no language count as one.
        batch: sentences that are translated together.
        devices: devices to partition the search over.
        search: how to search.
    """

    data: Path = DATA
    run: Path = RUN
    step: int | None = None
    sentences: int = 1000
    languages: tuple[str, ...] = ()
    output: Path | None = None
    baselines: tuple[str, ...] = ()
    batch: int = 32
    devices: int = 1
    search: tyro.conf.OmitArgPrefixes[DecodeConfig] = dataclasses.field(default_factory=DecodeConfig)

    def __call__(self) -> int:
        """Evaluates; what can be wrong with the baselines is told before anything is translated."""
        if self.sentences < 1:
            raise CommandError(f"cannot score {self.sentences} sentences.", way_out="Ask for at least one.")
        _check_devices(self.devices)
        translator = self._load(open_text(self.data), self.run, self.step)
        text = translator.text.of_languages(self.languages) if self.languages else translator.text
        others = [self._baseline(open_text(self.data), name) for name in self.baselines]
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

        pairs = translator.languages
        results = evaluate.measure(self.run.name, examples, written, pairs, self.step)
        compared: list[evaluate.Results] = []
        theirs: dict[str, list[str]] = {}
        for name, other in zip(self.baselines, others, strict=True):
            if isinstance(other, Translator):
                shared = [example for example in examples if example.language in other.languages]
                by_other = [t.text for t in other.translate([example.source for example in shared])]
                for example, line in zip(shared, by_other, strict=True):
                    theirs.setdefault(example.language, []).append(line)
                compared.append(evaluate.measure(name, shared, by_other, pairs))
            else:
                theirs |= evaluate.read_translations(Path(name) if Path(name).is_dir() else Path(name).parent)
                compared.append(other)
        deltas = evaluate.differences(results, compared)
        sure = evaluate.sureness(examples, written, theirs)
        print(f"\n{evaluate.summary(results, deltas, sure)}")
        folder = self.output or self.run / "evaluation"
        evaluate.save(folder, results, deltas, examples, written, sure)
        try:
            figure = importlib.import_module("m4.figure")
        except ModuleNotFoundError as error:
            print(f"m4: no figure was drawn: {error}; install matplotlib (the extra gshard[plot])", file=sys.stderr)
        else:
            names = " and ".join(Path(name).name for name in self.baselines)
            figure.figure(folder / "languages.svg", results, deltas, names)
        print(f"written: {folder}")
        return 0

    def _load(self, text: Any, run: Path, step: int | None) -> Translator:
        return load(Run(run), text, self.search, step, batch=self.batch, devices=self.devices)

    def _baseline(self, text: Any, name: str) -> evaluate.Results | Translator:
        folder, _, step = name.partition("@")
        if step:
            if not step.isdecimal():
                raise CommandError(f"{step!r} is no step of a run.", where=name, way_out="Write RUN@STEP.")
            return self._load(text, Path(folder), int(step))
        path = Path(name)
        for place in (path, path / "evaluation"):
            if place.is_file() or (place / evaluate.RESULTS).is_file():
                return evaluate.Results.load(place)
        return self._load(text, path, None)


def _serving() -> DecodeConfig:
    return DecodeConfig(n_best=3)


@dataclasses.dataclass(frozen=True)
class Serve:
    """Serves a web page and an HTTP interface for translation, until SIGTERM or Ctrl-C.

    Attributes:
        data: folder of the corpus the model was trained on, for its vocabularies.
        run: folder of the run.
        step: which checkpoint; the newest if not given.
        batch: sentences that are translated together.
        devices: devices to partition the search over.
        listen: where to listen, and how much to accept.
        search: how to search; n_best is the most alternatives that can be asked for.
    """

    data: Path = DATA
    run: Path = RUN
    step: int | None = None
    batch: int = 16
    devices: int = 1
    listen: tyro.conf.OmitArgPrefixes[ServeConfig] = dataclasses.field(default_factory=ServeConfig)
    search: tyro.conf.OmitArgPrefixes[DecodeConfig] = dataclasses.field(default_factory=_serving)

    def __call__(self) -> int:
        """Serves; a port that is in use is told before the model is read."""
        try:
            server = importlib.import_module("m4.serve.server")
        except ModuleNotFoundError as error:
            way_out = "pip install starlette uvicorn prometheus-client"
            raise CommandError(
                "serving needs a package that is not installed.", got=str(error), way_out=way_out
            ) from error
        with server.listen(self.listen) as bound:
            _check_devices(self.devices)
            text = open_text(self.data)
            translator = load(Run(self.run), text, self.search, self.step, batch=self.batch, devices=self.devices)
            ended_by: int = server.serve(translator, self.listen, bound, identify=text.identify)
        return 128 + ended_by if ended_by else 1


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
        text = open_text(self.corpus.folder)
        model = model_for(self.model, text, self.devices, self.train)
        demo(text, model, self.train, _unused(self.run), self.search, sentences=self.sentences, began=began)
        return 0


COMMANDS: dict[str, Callable[..., Any]] = {
    "prepare": Prepare,
    "train": Train,
    "translate": Translate,
    "evaluate": Evaluate,
    "serve": Serve,
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
