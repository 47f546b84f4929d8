"""Training state on disk, keyed by the model's own names, so that any plan loads it::

    run/step-200/
        manifest.json         step, position in the data, scheduler, options of the optimizer, file
                              of each tensor; checksums of all files and of itself
        rank-0.safetensors    model/text.0.weight  optimizer/exp_avg/text.0.weight ...
        rank-1.safetensors    model/image.0.weight ...

Every rank writes the tensors that it owns, in a new folder that takes its final name once
everything is on the disk. All files have the id of the checkpoint, so files of two checkpoints
cannot be mixed. Loading compares all files with their checksums, then reads only the tensors that
are asked for. Nothing is pickled, so a checkpoint from a stranger can be wrong but not dangerous.
All ranks have to see the file system.
"""

from anabranch.checkpoint.manifest import MANIFEST as MANIFEST
from anabranch.checkpoint.manifest import Progress as Progress
from anabranch.checkpoint.reading import Checkpoint as Checkpoint
from anabranch.checkpoint.reading import load_state_dict as load_state_dict
from anabranch.checkpoint.series import newest as newest
from anabranch.checkpoint.writing import RankPart as RankPart
