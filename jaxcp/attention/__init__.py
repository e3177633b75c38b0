"""One rank's attention over the keys it owns, as a mergeable partial."""

from jaxcp.attention.api import IMPLEMENTATIONS as IMPLEMENTATIONS
from jaxcp.attention.api import attention as attention
