"""A vision-language model on drawn shapes, packed: `truebatch train hf --task vlm` on LLaVA's records."""

import json
import random
from pathlib import Path

from PIL import Image, ImageDraw

from truebatch.hf.finetune.config import FinetuneConfig
from truebatch.hf.finetune.system import prepare_task
from truebatch.testing.tiny_hf.processors import tiny_vlm_folder
from truebatch.testing.toy_images import SHAPES, draw_shape

HOME = Path("vision_language")
COLOURS = {"red": (230, 30, 30), "green": (30, 180, 30), "blue": (40, 60, 230)}


def draw_data(number: int) -> Path:
    """Pictures of several sizes, one or two for each question, and what is on the last one."""
    pick, lines = random.Random(0), []
    for at in range(number):
        names = []
        for part in range(1 + at % 2):
            width, height = pick.choice([(24, 24), (40, 24), (24, 48)])
            colour, shape = pick.choice(list(COLOURS)), pick.choice(SHAPES)
            image = Image.new("RGB", (width, height), "white")
            draw_shape(ImageDraw.Draw(image), shape, (2, 2, 22, 22), COLOURS[colour])
            image.save(HOME / f"{at}-{part}.png")
            names.append(f"{at}-{part}.png")
        asked = {"from": "human", "value": "<image>\n" * len(names) + "what is on the last picture?"}
        lines.append({"image": names, "conversations": [asked, {"from": "gpt", "value": f"a {colour} {shape}"}]})
    (HOME / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return HOME / "data.jsonl"


HOME.mkdir(exist_ok=True)
model_folder = tiny_vlm_folder(HOME / "model", "qwen2_vl")  # your folder: hf download Qwen/Qwen3-VL-2B-Instruct
task = prepare_task(FinetuneConfig(model=model_folder, data=draw_data(24), task="vlm"))
measured = task.measured_data().measured  # from headers: no picture was decoded
print("tokens:", measured.lengths[:6].tolist(), "patches:", measured.costs["patches"][:6].tolist())
print("layout:", task.commands.choose_layout(task.build_model())[0])
print(f"next: truebatch train hf --model {model_folder} --data {HOME}/data.jsonl --task vlm")
