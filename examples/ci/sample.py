"""Prints a spec for a run on a sample: the same pipeline, on fewer rows, as a model with another name.

python sample.py SPEC WHERE      WHERE: an expression over columns, such as "distance % 10 == 0"
"""

import sys
from pathlib import Path

import yaml


def main() -> None:
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    path, where = Path(sys.argv[1]), sys.argv[2]
    try:
        spec = yaml.safe_load(path.read_text())
        data, name = spec["data"], spec["name"]
    except (OSError, yaml.YAMLError, KeyError, TypeError) as error:
        sys.exit(f"{path} is not a spec with a name and data: {error}")
    data["where"] = f"({data['where']}) and ({where})" if data.get("where") else where
    yaml.safe_dump(spec | {"name": f"{name}-sample"}, sys.stdout, sort_keys=False)


if __name__ == "__main__":
    main()
