"""The compiled decoder of recorded requests, built once where it is missing."""

from functools import cache

from serin.errors import TritonInstallFailed
from serin.serving.native.compiler import obtain_compiler
from serin.serving.native.decoder import Decoder
from serin.serving.native.decoder_library import build_decoder, decoder_path
from serin.serving.triton.installation import default_folder


@cache
def built_decoder() -> Decoder:
    """Skips the test where there is no compiler."""
    library = decoder_path(default_folder())
    try:
        if not library.is_file():
            build_decoder(obtain_compiler(default_folder()), library)
    except TritonInstallFailed as error:
        import pytest  # here: processes that are started often need it as well

        pytest.skip(str(error))
    return Decoder(library)
