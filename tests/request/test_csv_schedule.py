"""Which schedules of files can be trained."""

from pathlib import Path

import pytest

from megatron_pp_ext.request.csv_schedule import read_csv
from megatron_pp_ext.schedule import catalog, csv_file
from megatron_pp_ext.schedule.vocabulary import share


def test_a_vocabulary_that_the_ranks_share_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "shared.csv"
    csv_file.write(share(lambda count: catalog.build("v-half", 2, count), 4), file)
    with pytest.raises(ValueError, match=r"shared\.csv share the vocabulary.*without --shared-vocabulary"):
        read_csv(file, 2, first_first=False)
