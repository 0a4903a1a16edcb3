from millstream.wire.kafka.pure_runs import Part as Part
from millstream.wire.kafka.pure_runs import Shape as Shape
from millstream.wire.kafka.pure_runs import answer as answer
from millstream.wire.kafka.pure_runs import answers as answers
from millstream.wire.kafka.pure_runs import find as find
from millstream.wire.kafka.pure_runs import take as take
