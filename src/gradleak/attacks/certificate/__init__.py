"""When a guess may be called proven: docs/certificates.md says what that means and what it assumes."""

from gradleak.attacks.certificate.certify import CERTIFYING, Certificate, certify, certify_all, fits, with_certificates

__all__ = ["CERTIFYING", "Certificate", "certify", "certify_all", "fits", "with_certificates"]
