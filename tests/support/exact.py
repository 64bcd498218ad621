"""The shortest makespan there is, proved by a constraint solver: an oracle for small pipelines.

Nothing here knows how the compiler searches.  Every action is an interval; a rank does one at a time;
inputs arrive a hop after they are ready; a rank's activations are taken at the start of F and given
back at the end of I and of W, where I does not take more at its start.  Costs are whole numbers.
"""

from ortools.sat.python import cp_model

from megatron_pp_ext.schedule.actions import Kind


def shortest(placement, microbatches, costs, limits, *, effort, hint=None, ranks=None):
    """(lower bound, best makespan found) after at most ``effort`` on one core.

    The solver counts its effort in steps of its own, about a second each, so that the answer is the same on
    any machine.
    The two agree where the optimum is proved.  ``hint`` is a makespan that is known to be reached.
    If ``ranks`` are given, only these do one action at a time and within their limits.  All others do
    everything at once, so that what is proved for some ranks holds for the pipeline.
    Every stage takes its microbatches in order, as the project's schedules do.
    """
    model = cp_model.CpModel()
    alone = sum(c.forward + c.input_gradient + c.weight_gradient + 2 * costs.hop for c in costs.stages)
    horizon = round(hint or microbatches * alone)
    stages = range(placement.stages)
    last = placement.stages - 1
    start, end, on_rank = {}, {}, [[] for _ in range(placement.ranks)]
    for stage in stages:
        for kind in (Kind.F, Kind.I, Kind.W):
            for i in range(microbatches):
                action = stage, kind, i
                length = round(costs.stages[stage].seconds(kind))
                start[action] = model.new_int_var(0, horizon - length, f"{stage}{kind}{i}")
                end[action] = start[action] + length
                on_rank[placement.rank_of(stage)].append(
                    model.new_fixed_size_interval_var(start[action], length, f"busy {stage}{kind}{i}")
                )

    def after(later, earlier, hop):
        model.add(start[later] >= end[earlier] + hop)

    def hop(stage):
        return 0 if placement.is_local(stage) else round(costs.hop)

    for i in range(microbatches):
        for stage in stages:
            if stage < last:
                after((stage + 1, Kind.F, i), (stage, Kind.F, i), hop(stage))
                after((stage, Kind.I, i), (stage + 1, Kind.I, i), hop(stage))
            after((stage, Kind.I, i), (stage, Kind.F, i), 0)
            after((stage, Kind.W, i), (stage, Kind.I, i), 0)
            if i:
                for kind in (Kind.F, Kind.I, Kind.W):
                    after((stage, kind, i), (stage, kind, i - 1), 0)
    makespan = model.new_int_var(0, horizon, "makespan")
    for stage in stages:
        for i in range(microbatches):
            model.add(makespan >= end[stage, Kind.W, i])
    for rank, intervals in enumerate(on_rank):
        if ranks is not None and rank not in ranks:
            continue
        model.add_no_overlap(intervals)
        times, changes = [], []
        for stage in placement.stages_of(rank):
            cost = costs.stages[stage]
            for i in range(microbatches):
                released, late = round(cost.released_by_input_gradient), -round(cost.kept(Kind.W))
                during = round(cost.workspace) + max(0, -released)
                for at, change in (
                    (start[stage, Kind.F, i], round(cost.activation)),
                    (start[stage, Kind.I, i], during),
                    (end[stage, Kind.I, i], -during - released),
                    (end[stage, Kind.W, i], -late),
                ):
                    if change:
                        times.append(at)
                        changes.append(change)
        model.add_reservoir_constraint(times, [-change for change in changes], -int(limits[rank]), 0)
    model.minimize(makespan)
    solver = cp_model.CpSolver()
    solver.parameters.max_deterministic_time = effort
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 1
    status = solver.solve(model)
    best = solver.objective_value if status in (cp_model.OPTIMAL, cp_model.FEASIBLE) else float("inf")
    return solver.best_objective_bound, best
