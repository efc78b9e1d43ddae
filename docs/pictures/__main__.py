"""Draw every picture of the documentation: from the code, or from what docs/pictures/measure.py measured.

    python -m docs.pictures
"""

from pathlib import Path

from docs.pictures import loss, parting, recovery, rooms, save, shares, speed

PICTURES = {"shares": shares.draw, "loss": loss.draw, "map": rooms.draw, "save": save.draw, "recovery": recovery.draw,
            "speed": speed.draw, "parting": parting.draw}
FOLDER = Path(__file__).parent

if __name__ == "__main__":
    for name, draw in PICTURES.items():
        (FOLDER / f"{name}.svg").write_text(draw())
