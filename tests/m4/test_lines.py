"""What is told at the end of a translation."""

import io

from gshard_m4.lines import Speed
from gshard_m4.translate import Hypothesis, Translated


def test_lost_placeholders_are_told_with_the_first_line_that_lost_one():
    stream = io.StringIO()
    speed = Speed(stream, live=False)
    well = Translated((Hypothesis("a", 0.0),), tokens=3)
    speed.add([well, Translated((Hypothesis("b", 0.0),), lost=("%s", "{x}"), invented=("%d",)), well])
    speed.end(20)
    told = "1 translation was given the placeholders of the source (line 2: %s {x} put in, %d taken out)\n"
    assert told in stream.getvalue()
    speed.add([Translated((Hypothesis("c", 0.0),), invented=("%d",))])
    speed.end(20)
    assert "2 translations were given the placeholders of the source (line 2: %s" in stream.getvalue()
    stream = io.StringIO()
    Speed(stream, live=False).end(20)
    assert "placeholders" not in stream.getvalue()
