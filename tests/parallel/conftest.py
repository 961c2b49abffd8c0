import sys
from pathlib import Path

# The ranks' functions are found by name, in these folders, by the processes that run them.
for folder in (Path(__file__).parent, Path(__file__).parents[1] / "cli"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
