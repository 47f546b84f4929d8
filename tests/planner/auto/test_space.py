"""What the drafts of a problem may be made of."""

from dataclasses import replace

import pytest

from anabranch.planner.auto.settings import SETTINGS
from tests.planner.auto.test_moves import CHAIN, draft, space


@pytest.mark.parametrize(("second", "factor"), [(1, 1), (2, 6), (4, 5)])
def test_evaluations_of_many_passes_count_for_several(second, factor):
    """Of different sizes by the passes of all stages; of one size a part is run."""
    whole = replace(space(CHAIN), batch_size=4 * SETTINGS.passes)
    found = draft("000111", "000001")._replace(microbatch=(1, second))
    assert whole.effort(found) == factor
    assert replace(whole, flush=False).effort(found) == 1
