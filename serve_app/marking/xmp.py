"""XMP that names the IPTC's digital source type of a picture, which tools and platforms read without a key."""

import re
from enum import StrEnum

VOCABULARY = "http://cv.iptc.org/newscodes/digitalsourcetype/"
_PACKET = (
    '<?xpacket begin="\ufeff" id="W5M0MpCehiHzreSzNTczkc9d"?>'
    '<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:RDF xmlns:rdf="http://www.w3.org/1999/02/22-rdf-syntax-ns#">'
    '<rdf:Description rdf:about="" xmlns:Iptc4xmpExt="http://iptc.org/std/Iptc4xmpExt/2008-02-29/">'
    "<Iptc4xmpExt:DigitalSourceType>{uri}</Iptc4xmpExt:DigitalSourceType>"
    '</rdf:Description></rdf:RDF></x:xmpmeta><?xpacket end="r"?>'
)
_FOUND = re.compile(rb"DigitalSourceType\s*(?:>|=\s*[\"'])\s*([^\"'<\s]{1,200})")
"""The property as an element or as an attribute: both are RDF. No XML parser sees what a stranger sent."""


class SourceType(StrEnum):
    """The IPTC's words for what this service makes."""

    GENERATED = "trainedAlgorithmicMedia"
    COMPOSITE = "compositeWithTrainedAlgorithmicMedia"
    """A model has redrawn or enlarged a picture that somebody brought."""

    @property
    def uri(self) -> str:
        return VOCABULARY + self


def packet(source: SourceType) -> str:
    """Return the XMP packet of a picture; the same source type gives the same bytes."""
    return _PACKET.format(uri=source.uri)


def source_type_in(xmp: bytes) -> str:
    """Return the digital source type that XMP names, without the IPTC's own prefix; empty where it names none."""
    found = _FOUND.search(xmp)
    return found[1].decode(errors="replace").removeprefix(VOCABULARY) if found else ""
