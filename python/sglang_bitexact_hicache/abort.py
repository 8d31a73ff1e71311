"""Seam: end a request with an error without answering it and without inserting anything of it.

Uses what SGLang has for requests whose KV did not arrive: `skip_radix_cache_insert` keeps every later
checkpoint of the request out of the tree (mem_cache/common.py), `discard_output_reason` makes the
result processor finish it with that error instead of the sampled token
(scheduler_components/batch_result_processor.py). The server goes on.
"""

from __future__ import annotations

import logging
from http import HTTPStatus
from typing import Any

logger = logging.getLogger(__name__)


def discard_output(req: Any, why: str) -> None:
    """Finish `req` (a Req) with HTTP 500 and the reason `why`; logs one line. Scheduler thread."""
    from sglang.srt.managers.schedule_batch import FINISH_ABORT

    logger.error("bit-exact HiCache: request %s is aborted: %s", req.rid, why)
    req.skip_radix_cache_insert = True
    req.discard_output_reason = FINISH_ABORT(
        f"bit-exact HiCache: {why}", HTTPStatus.INTERNAL_SERVER_ERROR, "InternalServerError"
    )
