"""Prints a spec for a run on a sample: the same pipeline, on fewer rows, as a model with another name.

python sample.py SPEC WHERE      WHERE: an expression over columns, such as "distance % 10 == 0"
"""

import sys
from pathlib import Path

import yaml

from serin.errors import SpecError
from serin.spec.yaml_file import read_mapping


def main() -> None:
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    path, where = Path(sys.argv[1]), sys.argv[2]
    try:
        spec = dict(read_mapping(path))  # not as YAML 1.1, in which the key `on` of a join is a boolean
        data, name = dict(spec["data"]), spec["name"]
    except (SpecError, KeyError, TypeError, ValueError) as error:
        sys.exit(f"{path} is not a spec with a name and data: {error}")
    data["where"] = f"({data['where']}) and ({where})" if data.get("where") else where
    yaml.safe_dump(spec | {"name": f"{name}-sample", "data": data}, sys.stdout, sort_keys=False)


if __name__ == "__main__":
    main()
