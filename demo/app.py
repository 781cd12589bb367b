"""The demo as a Hugging Face Space, or `python demo/app.py` anywhere.

On a Space only what its variables name may be loaded (README.md lists them).
"""

import os

try:
    import spaces  # before torch: where GPUs are lent by the call (ZeroGPU), it stands in for CUDA
except ImportError:
    spaces = None

from dspark_hf.demo.service import DemoService
from dspark_hf.demo.shelf import BUNDLED, DEFAULT_TARGET, Limits, Shelf
from dspark_hf.demo.ui import build_demo, launch_options
from dspark_hf.demo.zero_gpu import races_on_lent_gpu

target = os.environ.get("DSPARK_DEMO_TARGET", DEFAULT_TARGET)
drafter = os.environ.get("DSPARK_DEMO_DRAFTER", BUNDLED)
service = DemoService(Shelf(limits=Limits.of(os.environ)))
races = None
if spaces is not None and os.environ.get("SPACES_ZERO_GPU"):
    races = races_on_lent_gpu(service, spaces.GPU)
else:
    service.warm_up(target, drafter)

demo = build_demo(service, target=target, drafter=drafter, races=races)

if __name__ == "__main__":
    demo.launch(**launch_options())
