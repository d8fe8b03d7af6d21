"""When a guess may be called proven: docs/certificates.md says what that means and what it assumes."""

from gradleak.attacks.certificate.certify import Certificate, certify, fits, with_certificate

__all__ = ["Certificate", "certify", "fits", "with_certificate"]
