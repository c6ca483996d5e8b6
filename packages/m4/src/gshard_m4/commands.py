"""What the command line can do: one frozen dataclass of options for each subcommand, which is then called."""

from __future__ import annotations

import dataclasses
import importlib
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import tyro

from gshard_m4 import checkpoint, lines, runs
from gshard_m4.batches import check_temperature
from gshard_m4.checkpoint_command import Checkpoint
from gshard_m4.config import ModelChoice, Run, TrainConfig
from gshard_m4.decode import DecodeConfig
from gshard_m4.demo_command import Demo
from gshard_m4.devices import check_devices, every_device, tell_uneven_experts
from gshard_m4.errors import CommandError
from gshard_m4.evaluate_command import Evaluate
from gshard_m4.groups import model_for
from gshard_m4.planned import describe_model, plan_summary
from gshard_m4.prepare import PrepareConfig, prepare
from gshard_m4.processes import Alone
from gshard_m4.score_command import Score
from gshard_m4.serve.config import ServeConfig
from gshard_m4.starting_point import starting_point
from gshard_m4.stopping import asked_to_stop
from gshard_m4.text import DATA, PreparedText
from gshard_m4.together import Processes, Together
from gshard_m4.train import train
from gshard_m4.translate import load

RUN = Path("runs/first")
_PLANNED = 8  # devices of a plan, if none are asked for


@dataclasses.dataclass(frozen=True)
class Prepare:
    """Makes a corpus ready for training: downloads, cleans, splits off held-out sentences, learns vocabularies."""

    corpus: tyro.conf.OmitArgPrefixes[PrepareConfig] = dataclasses.field(default_factory=PrepareConfig)

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
        devices: devices to partition the model over. By default all accelerators; without any, the processor as one
            device for each process, and 8 with --plan. A larger number takes virtual devices of the processor, which
            share its cores.
        replicas: parts into which the devices are divided. Each part has all experts and its share of the batch, and
            tokens move to experts inside of a part only. For more devices than experts, or several machines.
        resume: go on from the newest sound checkpoint of the run.
        start_from: begin with the parameters of this run's newest sound checkpoint (fine-tuning). The model is that
            run's; its vocabularies are needed: gshard-m4 prepare --vocabularies keeps them for other text.
        languages: train on these languages of the corpus only, for a bilingual baseline, say; on all if not given.
        tokens: tokens of a batch on each side; if not given, what the corpus was prepared for.
        temperature: 1 draws languages as often as they occur, larger values rare ones more often; if not given, what
            the corpus was prepared for.
        plan: only say how the step would be partitioned over so many devices, which need not exist.
        model: which model.
        train: how to train it.
        together: the processes that train together, one or several for each machine.
    """

    data: Path = DATA
    run: Path = RUN
    devices: int | None = None
    replicas: int = 1
    resume: bool = False
    start_from: Annotated[Path | None, tyro.conf.arg(name="from")] = None
    languages: tuple[str, ...] = ()
    tokens: int | None = None
    temperature: float | None = None
    plan: bool = False
    model: tyro.conf.OmitArgPrefixes[ModelChoice] = dataclasses.field(default_factory=ModelChoice)
    train: tyro.conf.OmitArgPrefixes[TrainConfig] = dataclasses.field(default_factory=TrainConfig)
    together: tyro.conf.OmitArgPrefixes[Processes] = dataclasses.field(default_factory=Processes)

    @property
    def virtual_devices(self) -> int:
        """Of this process, where devices are virtual."""
        if self.devices is None:
            return 1
        if self.devices % self.together.processes:
            raise CommandError(
                f"{self.devices} devices cannot be dealt out to {self.together.processes} processes.",
                hint="Give --devices, the devices of all processes together, as a multiple of --processes.",
            )
        return 1 if self.plan else self.devices // self.together.processes

    def __call__(self) -> int:
        """Trains; SIGTERM and Ctrl-C save, and end with exit code 143 and 130."""
        if self.plan:
            return self._plan()
        if self.together.several:
            self.together.initialize()
            return self._train(Together(self.together, Run(self.run).checkpoints))
        return self._train(Alone())

    def _plan(self) -> int:
        text = self._text()
        model = model_for(self.model, text, self.devices or _PLANNED, self.train, replicas=self.replicas)
        print(describe_model(model))
        print(plan_summary(model, self.train, text.batch(0)))
        return 0

    def _text(self) -> PreparedText:
        if self.temperature is not None:
            check_temperature(self.temperature)
        text = PreparedText.load(self.data)
        if self.tokens is not None and self.tokens < text.length:
            raise CommandError(
                f"a batch of {self.tokens} tokens cannot hold a sentence of {text.length}.",
                hint=f"Give --tokens of {text.length} or more.",
            )
        text = text.rebatched(tokens=self.tokens, temperature=self.temperature)
        return text.of_languages(self.languages) if self.languages else text

    def _train(self, group: Alone) -> int:
        with group, asked_to_stop() as asked:
            devices = self.devices or every_device()
            check_devices(devices)
            text = self._text()
            say = print if group.first else lambda line: None
            from_run = self.start_from
            start, like = (None, None) if from_run is None else starting_point(from_run, self.model, text)
            model = model_for(self.model, text, devices, self.train, say, like, self.replicas)
            run = Run(self.run)
            if group.first:
                print(describe_model(model), flush=True)
                if not checkpoint.steps(run.checkpoints):  # else it may be a mistake, which training refuses
                    runs.remember_corpus(run, self.data)
            result = train(
                model,
                self.train,
                run,
                text.batch,
                text.held_out(),
                meta={
                    "vocabularies": text.fingerprint,
                    "only": sorted(self.languages),
                    "corpus": text.digest,
                    "temperature": text.temperature,
                    **({} if self.start_from is None else {"from": str(self.start_from)}),
                },
                resume=self.resume,
                stop=asked,
                group=group,
                start=start,
            )
        if not group.first:
            return asked.exit_code if result.stopped else 0
        runs.remember_corpus(run, self.data)
        if not result.taken:
            print(
                f"{self.run} has taken its {result.steps:,} steps already: nothing was trained. "
                f"--steps of more than {result.steps} goes on."
            )
            return 0
        speed = f"{result.tokens_per_second:,.0f} target tokens/s, {result.seconds_per_step:.3f} s a step"
        print(f"{speed}; saved: {self.run}")
        if result.stopped:
            again = [word for word in sys.argv[1:] if word != "--resume"]
            line = shlex.join(["gshard-m4", *again, "--resume"])
            print(f"stopped as asked after step {result.steps}; go on with: {line}")
            return asked.exit_code
        return 0


@dataclasses.dataclass(frozen=True)
class Translate:
    """Translates lines of text into English, one line of output for each line of input.

    Attributes:
        input: a text file in UTF-8; if not given, standard input, which may be a pipe or a person.
        output: where to write; standard output if not given.
        language: the language of the input, by its code or its English name (de, German); the model
            reads it. Without it, the model tells languages apart by itself.
        data: folder of the corpus the model was trained on, for its vocabularies; what the run remembers if not given.
        run: folder of the run; the newest one if not given.
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
    data: Path | None = None
    run: Path | None = None
    step: int | None = None
    replace_invalid: bool = False
    quiet: bool = False
    batch: int = 32
    devices: int = 1
    search: tyro.conf.OmitArgPrefixes[DecodeConfig] = dataclasses.field(default_factory=DecodeConfig)

    def __call__(self) -> int:
        """Translates in blocks, so that neither a long input nor a slow reader fills the memory."""
        check_devices(self.devices)
        lines.check_files(self.input, self.output)
        run, text = _opened(self.run, self.data, self.quiet)
        if not self.quiet and sys.stderr.isatty():
            print(f"gshard-m4: reading the model of {run.directory} ...", file=sys.stderr)
        translator = load(run, text, self.search, self.step, batch=self.batch, devices=self.devices)
        tell_uneven_experts(translator.model.experts, self.devices)
        language = None if self.language is None else translator.check_language(self.language)
        by_hand = self.input is None and sys.stdin.isatty()
        if by_hand and not self.quiet:
            print(
                lines.greeting(run.directory, list(translator.languages), translator.text.length - 1), file=sys.stderr
            )
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


def _serving() -> DecodeConfig:
    return DecodeConfig(n_best=3)


@dataclasses.dataclass(frozen=True)
class Serve:
    """Serves a web page and an HTTP interface for translation, until SIGTERM or Ctrl-C.

    Attributes:
        data: folder of the corpus the model was trained on, for its vocabularies; what the run remembers if not given.
        run: folder of the run; the newest one if not given.
        step: which checkpoint; the newest if not given.
        batch: sentences that are translated together.
        devices: devices to partition the search over.
        listen: where to listen, and how much to accept.
        search: how to search; n_best is the most alternatives that can be asked for.
    """

    data: Path | None = None
    run: Path | None = None
    step: int | None = None
    batch: int = 16
    devices: int = 1
    listen: tyro.conf.OmitArgPrefixes[ServeConfig] = dataclasses.field(default_factory=ServeConfig)
    search: tyro.conf.OmitArgPrefixes[DecodeConfig] = dataclasses.field(default_factory=_serving)

    def __call__(self) -> int:
        """Serves; a port that is in use is an error before the model is read."""
        try:
            server = importlib.import_module("gshard_m4.serve.server")
        except ModuleNotFoundError as error:
            hint = 'pip install "gshard-m4[serve]" (in a clone: pip install . "./packages/m4[serve]")'
            raise CommandError("serving needs a package that is not installed.", got=str(error), hint=hint) from error
        with server.listen(self.listen) as bound:
            check_devices(self.devices)
            with server.starting(bound):
                run, text = _opened(self.run, self.data)
                translator = load(run, text, self.search, self.step, batch=self.batch, devices=self.devices)
            tell_uneven_experts(translator.model.experts, self.devices)
            ended_by: int = server.serve(translator, self.listen, bound)
        return 128 + ended_by if ended_by else 1


COMMANDS: dict[str, Callable[..., Any]] = {
    "prepare": Prepare,
    "train": Train,
    "translate": Translate,
    "evaluate": Evaluate,
    "score": Score,
    "serve": Serve,
    "checkpoint": Checkpoint,
    "demo": Demo,
}


def _opened(run: Path | None, data: Path | None, quiet: bool = False) -> tuple[Run, PreparedText]:
    """The run that was asked for, or the newest, and its corpus."""
    chosen = runs.chosen(run, quiet)
    return chosen, PreparedText.load(runs.corpus_of(chosen, data))
