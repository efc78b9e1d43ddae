"""shares.svg: the micro-batches of one global batch on 1 to 4 processes, by the program's own plan and sampler."""

from data.plan import BatchPlan
from data.sampler import ElasticDistributedSampler
from docs.pictures.svg import GREY, RAMP, WIDTH, Svg

PLAN = BatchPlan(num_samples=24, global_batch_size=24, num_micro_batches=6)
PROCESSES = (1, 2, 3, 4)
LEFT, TILE, ROW = 126, 95, 38  # px


def shares(world_size: int) -> list[list[int]]:
    """The numbers of each rank's micro-batches."""
    return [list(ElasticDistributedSampler(PLAN, rank, world_size, seed=0).share) for rank in range(world_size)]


def draw() -> str:
    """The picture."""
    count, num_samples = PLAN.num_micro_batches, PLAN.end(0)
    height = 196 + sum(44 + ROW * world_size for world_size in PROCESSES)
    svg = Svg(height, "One global batch on 1, 2, 3 and 4 processes", [
        f"Its {num_samples} samples make {count} micro-batches, a colour each, whatever the number of processes.",
        "Processes share them out, so each micro-batch computes the same on any number of them."])

    # the global batch: its samples in order
    side = (WIDTH - 48) / num_samples
    for number in range(count):
        for position in PLAN.positions(0, number):
            svg.rect(24 + side * position, 100, side - 3, 28, RAMP[number])
            svg.text(24 + side * position + (side - 3) / 2, 118.5, str(position), "on small", "middle")
    end = LEFT + count * TILE - 4
    svg.text(24, 162, "time in one step", "quiet small")
    svg.line(LEFT + 20, 158, end, 158)
    svg.curve([(end - 6, 154), (end, 158), (end - 6, 162)], GREY)

    # who computes which micro-batch, and when
    top = 192
    for world_size in PROCESSES:
        rows = shares(world_size)
        sizes = [len(share) for share in rows]
        what = f"{' + '.join(map(str, sizes))} micro-batches{', uneven shares' if len(set(sizes)) > 1 else ''}"
        svg.text(24, top, f"{world_size} process{'es' if world_size > 1 else ''}", "strong")
        svg.text(LEFT, top, what, "quiet")
        top += 12
        for rank, share in enumerate(rows):
            svg.text(24, top + 21, f"rank {rank}", "quiet")
            for turn in range(max(sizes)):
                x = LEFT + TILE * turn
                if turn < len(share):
                    svg.rect(x, top, TILE - 4, ROW - 6, RAMP[share[turn]])
                    svg.text(x + TILE / 2 - 2, top + 21, str(share[turn]), "on", "middle")
                else:
                    svg.rect(x, top, TILE - 4, ROW - 6, "none", stroke=GREY, stroke_dasharray="4 3")
                    svg.text(x + TILE / 2 - 2, top + 20, "waits", "quiet small", "middle")
            top += ROW
        top += 32
    return str(svg)
