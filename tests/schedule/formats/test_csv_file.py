import pytest
from hypothesis import HealthCheck, given, settings

from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.check import InvalidSchedule
from megatron_pp_ext.schedule.formats import csv_file
from megatron_pp_ext.schedule.placement import Shape
from tests.support import slow


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(schedule=slow.schedules())
def test_any_placement_is_recognised(schedule, tmp_path):
    csv_file.write(schedule, tmp_path / "random.csv")
    assert csv_file.read(tmp_path / "random.csv") == schedule


def test_idle_cells_and_spaces_are_accepted(tmp_path):
    path = tmp_path / "idle.csv"
    path.write_text("0F0,, ,0B0\n,1F0, 1B0,\n")
    schedule = csv_file.read(path)
    assert [" ".join(map(str, order)) for order in schedule.orders] == ["0F0 0B0", "1F0 1B0"]
    assert schedule.placement.shape is Shape.LINEAR


@pytest.mark.parametrize(
    "content",
    [
        b"0F0,0B0\n1F0,1B0\n\n\n",
        b"\n0F0,0B0\n\n1F0,1B0",
        b"0F0,0B0\r\n1F0,1B0\r\n \r\n,,\r\n",
        b"\xef\xbb\xbf0F0,0B0\n1F0,1B0\n",
    ],
    ids=["at the end", "between", "of spaces and commas", "behind a byte order mark"],
)
def test_lines_without_actions_and_a_byte_order_mark_are_no_matter(content, tmp_path):
    path = tmp_path / "1f1b.csv"
    path.write_bytes(content)
    assert csv_file.read(path) == catalog.build("1f1b", 2, 1)


@pytest.mark.parametrize("name", ["1f1b", "v-zb"])
def test_torchs_files_with_messages_are_refused_with_the_reason(name, tmp_path, torch_schedules):
    """Files that torch writes as ``compute_comms`` begin with an UNSHARD or a RECV_F."""
    schedule = catalog.build(name, 2, 3)
    sharded = {
        rank: torch_schedules._add_unshard_reshard(
            [torch_schedules._Action.from_str(str(action)) for action in order]
        )
        for rank, order in enumerate(schedule.orders)
    }
    placement = schedule.placement
    rows = torch_schedules._add_send_recv(sharded, placement.rank_of, placement.stages)
    path = tmp_path / "compute_comms.csv"
    path.write_text("".join(",".join(map(str, row)) + "\n" for _, row in sorted(rows.items())))
    with pytest.raises(ValueError, match=r"row 0, cell 0: '0UNSHARD' .*compute_comms.*compute_only"):
        csv_file.read(path)


OTHER_ACTIONS = (
    "0UNSHARD 0RESHARD 0SEND_F0 0RECV_F12 0SEND_B0 0RECV_B0 0WAIT_SEND_F0 0REDUCE_GRAD 0WAIT_REDUCE_GRAD"
)


@pytest.mark.parametrize("cell", OTHER_ACTIONS.split())
def test_each_of_torchs_other_actions_is_known(cell, tmp_path):
    path = tmp_path / "torchs.csv"
    path.write_text(f"0F0,0B0,{cell}\n1F0,1B0\n")
    with pytest.raises(ValueError, match=f"row 0, cell 2: '{cell}' .*compute_only") as error:
        csv_file.read(path)
    assert "is not an action" not in str(error.value)


GARBAGE = (
    "F0 0F 0X0 0f0 -1F0 0F-1 0F0x 0SEND_F0 (0F0)OVERLAP_F_B (0F0;SEND)OVERLAP_F_B "
    "(0F0;1B0;1F1)OVERLAP_F_B (0F0;1B0) 0F0.5 \u0660F\u0660 '"
)


@pytest.mark.parametrize("cell", GARBAGE.split())
def test_garbage_is_named_with_its_place(cell, tmp_path):
    path = tmp_path / "garbage.csv"
    path.write_text(f"0F0,0B0\n1F0,{cell},1B0\n", encoding="utf-8")
    with pytest.raises(ValueError, match="row 1, cell 1") as error:
        csv_file.read(path)
    assert repr(cell) in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "no actions found"),
        (b"\n\n", "no actions found"),
        (b",,\n,\n", "no actions found"),
        (b"0F0,0B0\n\xff\xfe,1B0\n", "is not UTF-8"),
        (b'0F0,"0B0\n1F0,1B0\n', "not a CSV file"),
        (b"0F0,0B0\n2F0,2B0\n", "fit no placement"),
        (b"1F0,1B0\n0F0,0B0\n", "fit no placement"),
        (b"0F0,0B0\n0F1,0B1\n", "fit no placement"),
        (b"0F0,1F0,1B0,0B0\n2F0,2B0\n", "fit no placement"),
    ],
)
def test_broken_files(content, message, tmp_path):
    path = tmp_path / "broken.csv"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message) as error:
        csv_file.read(path)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


def test_a_file_that_could_not_run_is_refused_by_name(tmp_path):
    path = tmp_path / "stuck.csv"
    path.write_text("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n")
    with pytest.raises(InvalidSchedule, match=r"stuck\.csv: deadlock"):
        csv_file.read(path)


@pytest.fixture(scope="module")
def torch_schedules():
    return pytest.importorskip("torch.distributed.pipelining.schedules")


def torch_loader(torch_schedules, schedule):
    """Load the file with torch's own loader, with no more around it than its checks need."""
    loader = object.__new__(torch_schedules.PipelineScheduleMulti)
    loader.pipeline_order = {}
    loader.pp_group_size = schedule.ranks
    loader._num_stages = schedule.placement.stages
    loader._n_microbatches = schedule.microbatches
    loader._stages = []
    return loader


@pytest.mark.parametrize("name", catalog.NAMES)
def test_torch_loads_our_files_and_we_load_torchs(name, tmp_path, torch_schedules):
    schedule = catalog.build(name, 4, 8)
    csv_file.write(schedule, tmp_path / f"{name}.csv")
    loader = torch_loader(torch_schedules, schedule)
    loader._load_csv(str(tmp_path / f"{name}.csv"))
    loaded = [[str(action) for action in loader.pipeline_order[rank]] for rank in range(4)]
    assert loaded == [[str(action) for action in order] for order in schedule.orders]

    (tmp_path / "torch").mkdir()
    loader._dump_csv(str(tmp_path / "torch" / f"{name}.csv"))
    assert csv_file.read(tmp_path / "torch" / f"{name}.csv") == schedule
