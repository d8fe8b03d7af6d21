"""When a guess may be called proven: docs/certificates.md says what that means and what it assumes."""

from gradleak.attacks.certificate.certify import NO_TIME, Certificate, certify, certify_all, fits, with_certificates

__all__ = ["NO_TIME", "Certificate", "certify", "certify_all", "fits", "with_certificates"]
