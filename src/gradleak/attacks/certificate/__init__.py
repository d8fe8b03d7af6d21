"""When a guess may be called proven: docs/certificates.md says what that means and what it assumes."""

from gradleak.attacks.certificate.certify import Certificate, certify, fits

__all__ = ["Certificate", "certify", "fits"]
